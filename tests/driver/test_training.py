"""A checkpoint is of one training: never continued, nor its model returned, for another one."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from every_row import every
from interruptions import policy, same_bits
from torch import Tensor, nn
from toys import Data, classification, make_job, mlp, schema

from sparkdl.checkpoint.storage import CheckpointStore
from sparkdl.driver import Outcome
from sparkdl.errors import ConfigError
from sparkdl.events import WindowReport
from sparkdl.feed.feed import FeedOptions
from sparkdl.feed.schema import FeedSchema
from sparkdl.protocols import Batch, ColumnSpec
from sparkdl.replica.losses import ModelLoss
from sparkdl.strategies import ParameterAveraging
from sparkdl.testing import run_world
from sparkdl.worker import Job

SIZES = [22, 14]
EPOCHS = 2


def job(**changes: Any) -> Job:
    return make_job(
        changes.pop("model", None) or mlp(),
        **{"epochs": EPOCHS, "loss": scaled_loss(1.0), **changes},
    )


def scaled_loss(scale: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda outputs, targets: scale * nn.functional.cross_entropy(outputs, targets)


def brighter(batch: Batch) -> Batch:
    (features,) = batch.features
    return replace(batch, features=(features * 2,))


def columns(feature: str = "features", label: str = "label", weight: str = "") -> FeedSchema:
    plain = schema()
    return FeedSchema(
        (replace(plain.features[0], name=feature),),
        ColumnSpec(label, torch.int64),
        ColumnSpec(weight, torch.float32) if weight else None,
    )


def train(path: Path, job: Job, shards: Any) -> tuple[Outcome, int]:
    """The outcome, and how many windows were trained for it."""
    windows: list[WindowReport] = []

    def note(event: object) -> None:
        if isinstance(event, WindowReport):
            windows.append(event)

    return run_world(job, shards, checkpoints=policy(path), on_event=note), len(windows)


def half(path: Path, job: Job, shards: Any) -> Outcome:
    """Train one epoch of two."""
    return train(path, replace(job, epochs=1), shards)[0]


def refusal(path: Path, job: Job, shards: Any) -> list[str]:
    """The lines in which a fit is told why it cannot have the checkpoint; no window is trained."""
    windows: list[object] = []
    with pytest.raises(ConfigError) as refused:
        run_world(job, shards, checkpoints=policy(path), on_event=windows.append)
    assert not any(isinstance(event, WindowReport) for event in windows)
    first, *lines, last = str(refused.value).splitlines()
    newest = max(path.glob("checkpoint-*.safetensors"))
    assert first == f"{newest} is a checkpoint of a different training:"
    assert "another checkpointPath, or start over in this one with resume='never'" in last
    return [line.strip() for line in lines]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """A path with half a training, and one with a whole one."""
    paths = tuple(tmp_path_factory.mktemp("saved") / "c" for _ in range(2))
    for path, run in zip(paths, (half, train), strict=True):
        run(path, job(), classification(SIZES).shards())
    return paths


class Louder(nn.Sequential):
    """As large as the other, and computes something else."""

    def forward(self, features: Tensor) -> Tensor:
        output: Tensor = super().forward(features)
        return 2 * output


def louder() -> nn.Module:
    return Louder(*mlp()).double()


CHANGED = "differs in its"
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.5)
DECAY = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda epoch: 0.9)
OTHERS: list[tuple[Any, ...]] = [
    ({"loss": nn.CrossEntropyLoss()}, r"loss: was .*<lambda>, is now CrossEntropyLoss\(\)"),
    (
        {"loss": ModelLoss(("kind",))},
        r"loss: was .*<lambda>, is now ModelLoss\(keywords=\('kind',\)\)",
    ),
    ({"loss": scaled_loss(2.0)}, f"loss: .* {CHANGED} variable scale"),
    ({"features_as_kwargs": True}, "features as keyword arguments: was false, is now true"),
    ({"clip_norm": 0.5}, "clip norm: was none, is now 0.5"),
    ({"precision": "bf16"}, "precision: was float32, is now bf16"),
    (
        {"schema": columns(feature="other")},
        r"features: was features \(float64\), is now other \(float64\)",
    ),
    ({"schema": columns(label="other")}, r"label: was label \(int64\), is now other \(int64\)"),
    ({"feed": FeedOptions(transform=brighter)}, "batch transform: was None, is now brighter"),
    ({"model": louder()}, "model: was Sequential, is now Louder"),
    ({"model": mlp(seed=4)}, f"model: .* {CHANGED} initial values"),
    (
        {"optimizer": MOMENTUM},
        "state: was .*83.*, is now .*optimizer.*83.*",
        "momentum of parameter group 0: was 0, is now 0.5",
    ),
    ({"scheduler": DECAY}, "scheduler: was none, is now LambdaLR.*"),
    ({"strategy": ParameterAveraging(period=3)}, "strategy: was .*period=1.*now .*period=3.*"),
    ({"batch_size": 2}, "batch size: was 4, is now 2"),
    ({"seed": 12}, "seed: was 11, is now 12"),
]


@every("case", OTHERS)
def test_another_objective_is_refused_by_name(saved: tuple[Path, ...], case: Any) -> None:
    changes, *expected = case
    for path in saved:
        found = refusal(path, job(**changes), classification(SIZES).shards())
        for line, pattern in zip(found, expected, strict=True):
            assert re.fullmatch(pattern, line), line


def with_rows(change: Callable[[np.ndarray, np.ndarray], None]) -> Any:
    data = classification(SIZES)
    features, targets = data.features.copy(), data.targets.copy()
    change(features, targets)
    return Data(features, targets, data.sizes).shards()


def one_value(features: np.ndarray, targets: np.ndarray) -> None:
    features[30, 2] = np.nextafter(features[30, 2], 9)


def one_for_another(features: np.ndarray, targets: np.ndarray) -> None:
    features[7], targets[7] = features[8], targets[8]


def labels_among_rows(features: np.ndarray, targets: np.ndarray) -> None:
    first, second = np.flatnonzero(targets[:22] == 0)[0], np.flatnonzero(targets[:22] == 1)[0]
    targets[[first, second]] = targets[[second, first]]


def all_turned(features: np.ndarray, targets: np.ndarray) -> None:
    features *= -1


@pytest.mark.parametrize("change", [one_value, one_for_another, labels_among_rows, all_turned])
def test_other_values_in_as_many_rows_are_refused(saved: tuple[Path, ...], change: Any) -> None:
    for path in saved:
        found = refusal(path, job(), with_rows(change))
        assert found == ["the training rows have different values"]


def test_a_fact_about_a_column_that_has_changed_is_told(saved: tuple[Path, ...]) -> None:
    def relabelled(features: np.ndarray, targets: np.ndarray) -> None:
        targets[targets == 2] = 1

    assert refusal(saved[1], job(), with_rows(relabelled)) == [
        "the training rows have different values",
        "largest of column 'label': was 2, is now 1",
    ]


def test_the_same_training_goes_on_and_once_it_has_ended_gives_its_model_and_says_so(
    saved: tuple[Path, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In other record batches, built of functions that were defined again."""
    shards = classification(SIZES).shards
    expected = run_world(job(), shards())
    with caplog.at_level(logging.WARNING):
        half(tmp_path / "c", job(), shards())
        resumed, windows = train(tmp_path / "c", job(), shards(rows_a_batch=5))
        assert windows > 0
        assert "has ended" not in caplog.text
        again, windows = train(tmp_path / "c", job(), shards(rows_a_batch=3))
    assert windows == 0
    assert same_bits(resumed, expected)
    assert same_bits(again, expected)
    assert again.history == resumed.history
    assert f"{tmp_path}/c/checkpoint-000002.safetensors already ended with epoch 2" in caplog.text
    assert "resume='never'" in caplog.text


def test_what_changes_no_step_may_differ(saved: tuple[Path, ...]) -> None:
    other = replace(job(), deadline_s=100.0, max_failures=2)
    _, windows = train(saved[1], other, classification(SIZES).shards())
    assert windows == 0


def test_a_model_of_more_epochs_is_not_given_for_fewer(saved: tuple[Path, ...]) -> None:
    found = refusal(saved[1], job(epochs=1), classification(SIZES).shards())
    assert found == ["epochs: 2 were started, but only 1 are wanted now"]


@pytest.mark.parametrize("column", ["weight", "held"])
def test_other_weights_and_other_rows_to_validate_with_are_refused(
    tmp_path: Path, column: str
) -> None:
    data = classification(SIZES)
    spec = ColumnSpec(column, torch.float32 if column == "weight" else torch.bool)
    added = replace(schema(), **{"weight" if column == "weight" else "validation": spec})
    weighted = job(schema=added, loss=nn.CrossEntropyLoss())

    def shards(values: np.ndarray) -> Any:
        cuts, found = [0, *np.cumsum(SIZES)], []
        for rank, batches in enumerate(data.shards(rows_a_batch=50)):
            mine = pa.array(values[cuts[rank] : cuts[rank + 1]])
            found.append([batches[0].append_column(column, mine)])
        return found

    values = np.arange(sum(SIZES)) % 3 + 1.0 if column == "weight" else np.arange(36) % 5 == 0
    swapped = values.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    path = tmp_path / "c"
    half(path, weighted, shards(values))

    found = refusal(path, weighted, shards(swapped))
    assert found[0] == "the training rows have different values"
    if column == "held":
        assert found[1] == "the held-out rows have different values"
    name = "weight" if column == "weight" else "validation indicator"
    with pytest.raises(ConfigError, match=f"{name}: was {column}"):
        run_world(job(loss=nn.CrossEntropyLoss()), data.shards(), checkpoints=policy(path))
    assert train(path, weighted, shards(values))[1] > 0


def test_a_checkpoint_that_does_not_say_what_it_is_of_is_refused(tmp_path: Path) -> None:
    """As versions wrote them that did not record the loss."""
    path = tmp_path / "c"
    half(path, job(), classification(SIZES).shards())
    store = CheckpointStore(str(path), keep_last=2)
    newest = store.newest()
    description = json.loads(json.dumps(newest.description))
    for key in ("loss", "precision"):
        del description["config"][key]
    store.write(newest.contents, description)
    with pytest.raises(
        ConfigError,
        match=r"checkpoint-000002\.safetensors was written by an earlier version of "
        r"sparkdl-torch, which did not record loss, precision.*resume='never'",
    ):
        run_world(job(), classification(SIZES).shards(), checkpoints=policy(path))
