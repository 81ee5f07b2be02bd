"""What a GPU is fed is what a CPU is, also while it is busy and for hundreds of minibatches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from every_row import every
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC
from toys import classification, make_job, mlp, schema

from sparkdl import encodings
from sparkdl.feed.feed import Feed, FeedOptions
from sparkdl.feed.schema import FeedSchema
from sparkdl.metrics import Metrics
from sparkdl.protocols import UNKNOWN, Batch, ColumnSpec, Padding
from sparkdl.strategies import ParameterAveraging
from sparkdl.testing import batches_of, run_world

ROWS = 60_000
WIDTH = 64


def numbers() -> tuple[FeedSchema, list[pa.RecordBatch]]:
    generator = np.random.default_rng(1)
    features = generator.normal(size=(ROWS, WIDTH)).astype(np.float32)
    columns = FeedSchema(
        (ColumnSpec("features", torch.float32, (WIDTH,)),), ColumnSpec("label", torch.int64)
    )
    return columns, batches_of(4096, features=features, label=np.arange(ROWS))


def images() -> tuple[FeedSchema, list[pa.RecordBatch]]:
    generator = np.random.default_rng(2)
    octets = [generator.bytes(3 * 16 * 16) for _ in range(ROWS // 10)]
    table = pa.table({"image": pa.array(octets, pa.binary()), "label": np.arange(len(octets))})
    image = ColumnSpec("image", torch.uint8, (3, 16, 16), encodings.BYTES)
    return FeedSchema((image,), ColumnSpec("label", torch.int64)), table.to_batches(500)


def sequences() -> tuple[FeedSchema, list[pa.RecordBatch]]:
    generator = np.random.default_rng(3)
    lengths = generator.integers(0, 90, ROWS // 10)
    values = pa.array(generator.integers(1, 999, lengths.sum()))
    tokens = pa.ListArray.from_arrays(pa.array(np.cumsum([0, *lengths]), pa.int32()), values)
    table = pa.table({"tokens": tokens, "label": np.arange(len(lengths))})
    padded = ColumnSpec("tokens", torch.int64, (UNKNOWN,), padding=Padding(0, "padding_mask"))
    return FeedSchema((padded,), ColumnSpec("label", torch.int64)), table.to_batches(700)


KINDS = {"numbers": numbers, "images": images, "sequences": sequences}


def checksums(batch: Batch, busy: Callable[[], object]) -> Tensor:
    """Numbers that change with any value and any order, computed behind other work."""
    busy()
    found = []
    for tensor in (*batch.features, batch.targets):
        flat = tensor.reshape(-1).double()
        weights = torch.arange(1, len(flat) + 1, dtype=torch.float64, device=flat.device)
        found.append((flat * weights.remainder(8191)).sum())
    return torch.stack(found)


@every(("kind", "grouped"), [*((kind, False) for kind in KINDS), ("sequences", True)])
def test_every_minibatch_is_the_same_while_the_gpu_is_busy(
    tmp_path: Path, kind: str, grouped: bool
) -> None:
    columns, batches = KINDS[kind]()
    large = torch.rand(3000, 3000, device="cuda")
    found = {}
    for device in ("cpu", "cuda:0"):
        busy = (lambda: large @ large) if device != "cpu" else (lambda: None)
        with Feed(
            columns,
            batch_size=97,
            seed=5,
            rank=0,
            directory=tmp_path,
            device=device,
            options=FeedOptions(group_by_length=grouped),
        ) as feed:
            feed.fill(batches)
            sums = [checksums(b, busy) for epoch in (1, 2, 3) for b in feed.epoch(epoch)]
        found[device] = torch.stack(sums).cpu()
    assert torch.allclose(found["cpu"], found["cuda:0"], rtol=1e-12)


def test_abandoned_in_the_middle_of_an_epoch_a_feed_goes_on_with_the_next(tmp_path: Path) -> None:
    columns, batches = numbers()
    with Feed(columns, batch_size=97, seed=5, rank=0, directory=tmp_path, device="cuda:0") as feed:
        feed.fill(batches)
        for epoch in range(1, 6):
            for index, _ in enumerate(feed.epoch(epoch)):
                if index == 3 * epoch:
                    break
        ids = torch.cat([batch.targets for batch in feed.epoch(6)])
    assert torch.equal(ids.sort().values.cpu(), torch.arange(ROWS))


def test_validation_and_its_metrics_are_computed_on_it() -> None:
    shards = []
    for rows in classification([240, 150]).shards(60):
        table = pa.Table.from_batches(rows)
        held = pa.array(np.arange(table.num_rows) % 3 == 0)
        shards.append(table.append_column("held", held).to_batches(max_chunksize=50))
    metrics = Metrics.of(
        {"accuracy": MulticlassAccuracy(3, average="micro"), "auroc": MulticlassAUROC(3)},
        lambda outputs, targets: (outputs.softmax(1), targets),
    )
    job = make_job(
        mlp(),
        schema=replace(schema(), validation=ColumnSpec("held", torch.bool)),
        metrics=metrics,
        strategy=ParameterAveraging(2),
        epochs=3,
        loss=nn.CrossEntropyLoss(),
    )
    on_cpu, on_gpu = (run_world(job, shards, devices=[d] * 2) for d in ("cpu", "cuda:0"))
    for mine, other in zip(on_gpu.history, on_cpu.history, strict=True):
        assert mine.validation_loss == pytest.approx(other.validation_loss, rel=1e-8)
        assert mine.metrics == pytest.approx(other.metrics, rel=1e-5)
