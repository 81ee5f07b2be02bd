"""A user's own DDP loop on the rows of a DataFrame: every row once, nobody waits in vain."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import frames
import numpy as np
import pytest
import torch
import torch.distributed as dist
from frames import features_of, frame, frame_of_sizes, labels_of
from open_files import unnamed_files
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import nn
from torch.nn.functional import cross_entropy

import sparkdl
from sparkdl.errors import ConfigError, DataError, WorkerError
from sparkdl.spark.rows import scratch

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(frames)

Ids = list[list[list[int]]]
"""Row ids by epoch, step and row."""


def train(epochs: int, batch_size: int) -> tuple[Ids, list[float]]:
    """As the documentation shows it; returns which rows were seen and the parameters."""
    worker = sparkdl.current_worker()
    torch.manual_seed(100 + worker.rank)  # wrap() makes the workers equal, not this
    model = nn.Sequential(nn.Linear(frames.WIDTH, frames.CLASSES))
    model, optimizer = worker.wrap(model, torch.optim.SGD(model.parameters(), lr=0.5))
    seen: Ids = []
    for _ in range(epochs):
        seen.append([])
        for batch in worker.batches(batch_size):
            loss = cross_entropy(model(batch["features"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen[-1].append(batch["id"].tolist())
    return seen, flat(model)


def flat(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def train_alone(seen_by_rank: list[Ids]) -> list[float]:
    """One process on the union of the workers' minibatches."""
    with torch.random.fork_rng():
        torch.manual_seed(100)
        model = nn.Sequential(nn.Linear(frames.WIDTH, frames.CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epochs in zip(*seen_by_rank, strict=True):
        for step in zip(*epochs, strict=True):
            ids = [i for mine in step for i in mine]
            x = torch.tensor(features_of(ids), dtype=torch.float32)
            optimizer.zero_grad()
            cross_entropy(model(x), torch.tensor(labels_of(ids))).backward()
            optimizer.step()
    return flat(model)


UNEQUAL = {
    "skewed": [41, 7, 12],
    "fewer rows than steps": [54, 3, 3],
    "an empty one": [30, 0, 30],
}


@pytest.mark.nightly_variants
@pytest.mark.parametrize("sizes", UNEQUAL.values(), ids=UNEQUAL)
def test_a_ddp_loop_on_unequal_partitions_is_single_process_training_on_every_row_once(
    spark: SparkSession, sizes: list[int]
) -> None:
    rows = frame_of_sizes(spark, sizes)
    results = sparkdl.run(train, 2, 8, num_workers=3, df=rows, shuffleRows="none")

    seen = [ids for ids, _ in results]
    steps = math.ceil(max(sizes) / 8)
    for rank, size in enumerate(sizes):
        for epoch in seen[rank]:
            assert sorted(map(len, epoch))[:: steps - 1] == [size // steps, -(-size // steps)]
    for epoch in range(2):
        assert sorted(i for ids in seen for step in ids[epoch] for i in step) == list(range(60))
    assert results[0][1] == results[1][1] == results[2][1]
    np.testing.assert_allclose(results[0][1], train_alone(seen), rtol=1e-4, atol=1e-6)


def gradients_after_loops() -> dict[str, float]:
    """The mean over workers of 1.0 on rank 0 and 2.0 on rank 1, after loops of several kinds."""
    worker = sparkdl.current_worker()
    linear = nn.Linear(1, 1, bias=False)
    model, optimizer = worker.wrap(linear, torch.optim.SGD(linear.parameters(), lr=0.1))

    def gradient() -> float:
        optimizer.zero_grad()
        model(torch.full((4, 1), float(worker.rank + 1))).mean().backward()
        assert linear.weight.grad is not None
        return float(linear.weight.grad.item())

    def first_batch() -> None:
        for _ in worker.batches(10):
            raise ValueError

    found = {}
    for _ in worker.batches(10):
        break
    found["broken off"] = gradient()
    with contextlib.suppress(ValueError):
        first_batch()
    found["failed"] = gradient()
    next(iter(worker.batches(10)))
    found["taken from"] = gradient()
    for _ in worker.batches(10):
        found["within"] = gradient()
        for _ in worker.batches(10):
            break
        found["after one within another"] = gradient()
    found["run to the end"] = gradient()
    left = iter(worker.batches(10))
    next(left)
    for _ in worker.batches(10):
        del left
        found["while an older one is given up"] = gradient()
        break
    return found


@pytest.mark.gate
def test_shares_of_a_minibatch_count_within_its_loop_only(spark: SparkSession) -> None:
    rows = frame_of_sizes(spark, [2, 100])
    found = sparkdl.run(gradients_after_loops, num_workers=2, df=rows, shuffleRows="none")
    # Of ten steps, the first has no row of rank 0; the last has one, and ten of rank 1.
    first, last, alike = 2.0, (1 + 2 * 10) / 11, 1.5
    assert found[0] == pytest.approx(
        {
            "broken off": alike,
            "failed": alike,
            "taken from": alike,
            "within": last,
            "after one within another": last,
            "run to the end": alike,
            "while an older one is given up": first,
        }
    )


def gradient_within_a_group() -> float:
    """The mean of ``rank + 1`` over the rows of ranks 0 and 1, or those of rank 2 alone."""
    worker = sparkdl.current_worker()
    dist.init_process_group("gloo")
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2])]
    linear = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    model, _ = worker.wrap(linear, optimizer, process_group=groups[worker.rank // 2])
    for batch in worker.batches(30):
        model(torch.full((len(batch["id"]), 1), worker.rank + 1.0)).mean().backward()
    assert linear.weight.grad is not None
    return linear.weight.grad.item()


@pytest.mark.gate
def test_a_model_in_a_group_of_some_ranks_learns_from_their_rows_alone(
    spark: SparkSession,
) -> None:
    rows = frame_of_sizes(spark, [10, 30, 20])
    found = sparkdl.run(gradient_within_a_group, num_workers=3, df=rows, shuffleRows="none")
    mean = (10 * 1 + 30 * 2) / 40
    assert found == pytest.approx([mean, mean, 3.0])


def test_rows_are_spread_evenly_and_fed_in_another_order_each_epoch(spark: SparkSession) -> None:
    def look() -> Ids:
        batches = sparkdl.current_worker().batches(10)
        assert len(batches) == 4
        return [[batch["id"].tolist() for batch in batches] for _ in range(2)]

    rows = frame_of_sizes(spark, [60, 4, 6])
    runs = [sparkdl.run(look, num_workers=2, df=rows) for _ in "ab"]

    assert runs[0] == runs[1]
    ids = [[i for step in epoch for i in step] for epochs in runs[0] for epoch in epochs]
    assert [len(each) for each in ids] == [35] * 4
    assert sorted(ids[0] + ids[2]) == sorted(ids[1] + ids[3]) == list(range(70))
    assert ids[0] != ids[1] != sorted(ids[1])


def test_rows_are_kept_where_the_user_wants_them_and_nothing_of_them_is_left(
    spark: SparkSession,
) -> None:
    """They are in files without a name, which end with the processes that have them open."""
    rows = frame_of_sizes(spark, [30, 30])

    def look() -> list[str]:
        assert sum(len(b["id"]) for b in sparkdl.current_worker().batches(4)) == 30
        return unnamed_files()

    def kept_in(**settings: Any) -> set[bool]:
        results = sparkdl.run(look, num_workers=2, df=rows, **settings)
        assert all(results)
        return {file.startswith(str(scratch.MEMORY)) for files in results for file in files}

    assert kept_in() == {False}
    assert kept_in(storeIn="memory") == {True}
    assert sparkdl.run(unnamed_files, num_workers=3) == [[], [], []]


@pytest.mark.versions
def test_every_column_becomes_a_tensor_as_declared(spark: SparkSession) -> None:
    rows = frame(spark, rows=4, partitions=1).select(
        F.col("id").cast("short").alias("small"),
        (F.col("id") / 2).alias("half"),
        F.expr("array(array(id, 1L), array(2L, 3L))").alias("nested"),
        F.col("features").alias("rounded"),
    )

    def look() -> dict[str, Any]:
        with pytest.raises(ConfigError, match="batch_size must be a whole number"):
            sparkdl.current_worker().batches(0)
        (batch,) = sparkdl.current_worker().batches(4)
        return {name: (str(values.dtype), values.tolist()) for name, values in batch.items()}

    (found,) = sparkdl.run(
        look,
        num_workers=1,
        df=rows.orderBy("small"),
        columnShapes={"nested": [2, 2]},
        columnDtypes={"rounded": "bfloat16"},
    )

    ids = found["small"][1]
    assert sorted(ids) == [0, 1, 2, 3]
    expected = torch.tensor(features_of(ids)).to(torch.bfloat16).tolist()
    assert found == {
        "small": ("torch.int64", ids),
        "half": ("torch.float32", [i / 2 for i in ids]),
        "nested": ("torch.int64", [[[i, 1], [2, 3]] for i in ids]),
        "rounded": ("torch.bfloat16", expected),
    }


def test_reports_reach_the_function_for_them_with_their_rank(
    spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    def speak() -> None:
        worker = sparkdl.current_worker()
        for epoch in range(3):
            worker.report(epoch=epoch, loss=torch.tensor(0.5 + worker.rank, requires_grad=True))
        with pytest.raises(ConfigError, match="report takes numbers"):
            worker.report(x="many")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"there are no rows: .* df="):
            worker.batches(3)

    reports: list[tuple[int, dict[str, float]]] = []
    sparkdl.run(speak, num_workers=2, on_report=lambda *report: reports.append(report))
    assert capsys.readouterr() == ("", "")
    for rank in (0, 1):
        mine = [metrics for sender, metrics in reports if sender == rank]
        assert mine == [{"epoch": epoch, "loss": 0.5 + rank} for epoch in range(3)]


def test_a_whole_number_is_reported_exactly_or_refused(spark: SparkSession) -> None:
    def speak() -> list[str]:
        worker, told = sparkdl.current_worker(), list[str]()
        exact: list[Any] = [2**53, np.int64(2**62), torch.tensor(-(2**60))]
        for rows in exact:
            worker.report(rows=rows)
        inexact: list[Any] = [2**53 + 1, np.uint64(2**64 - 1), torch.tensor([2**53 + 1]), 10**400]
        for rows in inexact:
            with pytest.raises(ConfigError) as refused:
                worker.report(rows=rows)
            told.append(str(refused.value))
        return told

    reports = list[float]()
    (told,) = sparkdl.run(
        speak, num_workers=1, on_report=lambda _, numbers: reports.append(numbers["rows"])
    )
    assert reports == [2**53, 2**62, -(2**60)]
    assert "rows=9007199254740993 would arrive as 9007199254740992" in told[0]
    assert "rows=18446744073709551615 would arrive as 18446744073709551616" in told[1]
    assert "rows=9007199254740993 would arrive as 9007199254740992" in told[2]
    assert "too large" in told[3]


def test_a_checkpoint_is_written_once_and_read_by_workers_and_driver(
    spark: SparkSession, tmp_path: Path
) -> None:
    path = str(tmp_path / "run")

    def go_on() -> tuple[int, list[float]]:
        worker = sparkdl.current_worker()
        model = nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters())
        state = sparkdl.load_checkpoint(path) or {"epoch": 0}
        if state["epoch"]:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        wrapped, optimizer = worker.wrap(model, optimizer)
        wrapped(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        epoch = state["epoch"] + 1
        new = {"epoch": epoch, "model": wrapped, "optimizer": optimizer, "rank": worker.rank}
        worker.save_checkpoint(path, new)
        seen_by_all = sparkdl.load_checkpoint(path)
        assert seen_by_all is not None
        return seen_by_all["epoch"], flat(model)

    for expected in (1, 2):
        results = sparkdl.run(go_on, num_workers=2)
        assert results[0] == results[1]
        assert results[0][0] == expected

    state = sparkdl.load_checkpoint(path)
    assert state is not None
    assert (state["rank"], state["optimizer"]["state"][0]["step"].item()) == (0, 2)
    model = nn.Linear(2, 1)
    model.load_state_dict(state["model"])
    assert flat(model) == results[0][1]
    assert len(list((tmp_path / "run").iterdir())) == 2


@pytest.mark.gate
def test_a_checkpoint_that_cannot_be_written_ends_the_run_for_all(spark: SparkSession) -> None:
    def save() -> None:
        sparkdl.current_worker().save_checkpoint("/proc/nowhere", {"epoch": 1})

    with pytest.raises(WorkerError, match=r"rank 0 .*/proc/nowhere"):
        sparkdl.run(save, num_workers=2)


BAD: dict[str, tuple[Callable[[DataFrame], DataFrame], dict[str, Any], str]] = {
    "null": (
        lambda rows: rows.withColumn("label", F.when(F.col("id") != 33, F.col("label"))),
        {},
        r"'label' has 1 null value in 60 rows \(the first is row 3 of partition 1\)",
    ),
    "text": (lambda rows: rows.withColumn("name", F.lit("a")), {}, "'name'.*string.*StringIndexer"),
}


@pytest.mark.parametrize("kind", [pytest.param("null", marks=pytest.mark.gate), "text"])
def test_rows_that_cannot_be_fed_are_refused_before_the_function_is_called(
    spark: SparkSession, kind: str
) -> None:
    change, settings, message = BAD[kind]
    rows = change(frame(spark, rows=60, partitions=2))
    with pytest.raises(DataError, match=message) as caught:
        sparkdl.run(_never, num_workers=2, df=rows, **settings)
    assert "handleInvalid" not in str(caught.value), "run has no such argument"


def _never() -> None:
    raise AssertionError("called in spite of its rows")


def test_what_makes_no_sense_is_refused(spark: SparkSession) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"columnDtypes": {"other": "int8"}}, "columnDtypes names 'other'"),
        ({"columnDtypes": {"id": "int7"}}, "columnDtypes must give"),
        ({"shuffleSeed": 0.5}, r"shuffleSeed must be a whole number .*, got 0\.5"),
        ({"storeIn": "tape"}, "storeIn must be one of disk, memory, got 'tape'"),
        ({"shuffleRows": "always"}, "shuffleRows must be one of exchange, spark, none, got"),
        ({"shuffleRows": "none"}, r"shuffleRows='none' .* has 3 for 2 tasks"),
    ]
    for settings, words in refused:
        with pytest.raises(ConfigError, match=words):
            sparkdl.run(_never, df=frame(spark), **settings)
