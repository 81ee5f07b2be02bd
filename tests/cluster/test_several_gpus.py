"""Two executors, two faked GPUs each, two GPUs a task: four ranks, each a process of its own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from frames import descended, estimator, labels_of
from subprocesses import run_python
from train_on_gpus import EPOCHS, ROWS

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(500)]
HERE = Path(__file__).parent

# Each executor's host has two of the four.
DISCOVERY = """#!/bin/sh
if mkdir "$0.first" 2>/dev/null; then
    echo '{"name": "gpu", "addresses": ["0", "1"]}'
else
    echo '{"name": "gpu", "addresses": ["2", "3"]}'
fi
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came out of each scenario of ``train_on_gpus.py``, and what was printed."""
    directory = tmp_path_factory.mktemp("gpus")
    discovery, output = directory / "discover.sh", directory / "output"
    discovery.write_text(DISCOVERY)
    discovery.chmod(0o755)
    done = run_python(
        HERE / "train_on_gpus.py",
        discovery,
        output,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path])},
        timeout=450,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = map(json.loads, output.read_text().splitlines())
    found = {line["name"]: line["found"] for line in lines}
    return {**found, "printed": done.stdout, "errors": done.stderr}


def assert_trained_as_alone(found: dict[str, Any]) -> None:
    """As in full batches of all rows in one process."""
    alone = descended(estimator().getModel(), labels_of(range(ROWS)), lr=0.1, steps=EPOCHS)
    for value, expected in zip(found["bits"], alone.state_dict().values(), strict=True):
        off = torch.tensor(value) - expected.double().flatten()
        assert float(off.abs().max() / expected.abs().max()) <= 1e-5
    assert found["examples"] == [ROWS] * EPOCHS


def test_each_gpu_is_one_ranks_and_the_ranks_of_a_task_follow_each_other(
    told: dict[str, Any],
) -> None:
    ranks = told["look"]
    assert [each["rank"] for each in ranks] == [0, 1, 2, 3]
    assert sorted(each["gpu"] for each in ranks) == ["0", "1", "2", "3"]
    assert [each["gpu"] for each in ranks] in (list("0123"), list("2301"))
    assert len({each["pid"] for each in ranks}) == 4
    first, second = ([each["task"] for each in ranks[at : at + 2]] for at in (0, 2))
    assert first == [first[0]] * 2 != second == [second[0]] * 2


def test_the_environment_is_that_of_torchrun(told: dict[str, Any]) -> None:
    found = [each["environment"] for each in told["look"]]
    assert found == [[str(rank), "4", str(rank), "4"] for rank in range(4)]


def test_what_each_rank_prints_is_shown_behind_its_rank(told: dict[str, Any]) -> None:
    for rank in range(4):
        assert f"[rank {rank}] hello from {rank}" in told["printed"]


def test_every_row_is_fed_to_one_rank_once_an_epoch_and_to_the_same_in_every_run(
    told: dict[str, Any],
) -> None:
    first, second = told["rows"]
    assert first == second
    for epoch in (0, 1):
        assert sorted(i for rank in first for i in rank[epoch]) == list(range(ROWS))
    assert all(sorted(rank[0]) == sorted(rank[1]) != [] for rank in first)


def test_fits_equal_training_on_all_rows_in_one_process(told: dict[str, Any]) -> None:
    assert_trained_as_alone(told["averaging"][0])
    assert_trained_as_alone(told["all-reduce"])


def test_the_same_fit_twice_gives_the_same_bits(told: dict[str, Any]) -> None:
    first, second = told["averaging"]
    assert first == second


def test_no_wish_means_every_gpu_and_ranks_without_rows_take_part(told: dict[str, Any]) -> None:
    assert told["all workers"]["examples"] == [ROWS]
    assert told["few rows"]["examples"] == [5]
    assert "the DataFrame has 3 rows, fewer than the 4 workers" in told["too few rows"]
    assert told["cores"] == 2  # tasks that the GPUs suffice for, though there are four cores


def test_what_cannot_run_is_refused_with_the_numbers(told: dict[str, Any]) -> None:
    assert "numWorkers is 3, but spark.task.resource.gpu.amount is 2" in told["not a multiple"]
    assert "numWorkers is 6, but the executors have 4 GPUs" in told["too many"]


def test_torch_distributor_runs_here_too(told: dict[str, Any]) -> None:
    """As far as it comes without a GPU that torch sees."""
    assert told["no such GPU"].startswith("WorkerError: rank ")
    assert "device='cuda', but torch sees no GPU on this executor" in told["no such GPU"]


def test_a_rank_that_is_killed_is_one_loss_and_its_task_is_started_again(
    told: dict[str, Any],
) -> None:
    """``maxFailures`` is 1, and two processes end: the one killed, and its neighbour."""
    assert told["kill"]["examples"] == [ROWS] * 2
    assert told["kill task"]["examples"] == [ROWS] * 2


def test_cancelled_or_done_no_process_of_a_rank_stays(told: dict[str, Any]) -> None:
    assert told["cancel"]["started"] == 4, told["cancel"]["told"]
    assert told["cancel"]["left"] == []
    assert "cancel" in told["cancel"]["told"][0]
    assert told["left"] == []
