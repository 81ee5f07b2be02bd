"""From the GPU addresses that Spark assigns to the devices that torch counts."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from subprocesses import printed_by

from sparkdl.collective.network import require_distinct_gpus
from sparkdl.errors import ConfigError
from sparkdl.spark.catalyst import accumulators
from sparkdl.spark.cluster.devices import choose_device, device_index
from sparkdl.spark.launch import assignment
from sparkdl.spark.launch.assignment import assignments, run_ranks
from sparkdl.spark.sending import InPieces

UUIDS = [f"GPU-{letter * 8}-0000" for letter in "abcd"]


def test_an_address_is_found_by_number_position_or_uuid() -> None:
    cases = [
        ("0", None, 0),
        ("3", None, 3),
        ("0", "0,1,2,3", 0),
        ("3", "2,3", 1),  # as nvidia-smi numbers them
        ("1", "2,3", 1),  # a position: no GPU 1 is listed
        ("2", "3, 2 ,1,0", 1),
        (UUIDS[2], None, 2),
        (UUIDS[2], "0,1,2,3", 2),
        (UUIDS[1], f"{UUIDS[3]},{UUIDS[1]}", 1),
        ("GPU-bbbb", f"{UUIDS[3]},{UUIDS[1]}", 1),
        (UUIDS[1], "GPU-dddd,GPU-bbbb", 1),
        ("1", f"{UUIDS[3]},{UUIDS[1]}", 1),  # a position among UUIDs
    ]
    for address, visible, index in cases:
        seen = UUIDS if visible is None else UUIDS[: len(visible.split(","))]
        assert device_index(address, visible, seen) == index, (address, visible)


def test_a_gpu_that_torch_does_not_see_is_an_error_with_the_numbers() -> None:
    cases = [
        ("4", None, 4),
        ("2", "0,1", 2),
        ("0", "", 0),
        ("GPU-eeee", None, 4),
        ("GPU-", None, 4),  # fits all of them
        (UUIDS[2], f"{UUIDS[0]},{UUIDS[1]}", 2),
        ("1", "0,1", 1),  # listed, but torch sees fewer
    ]
    for address, visible, seen in cases:
        with pytest.raises(ConfigError, match=f"assigned GPU {address} .* sees {seen} GPUs"):
            device_index(address, visible, UUIDS[:seen])


def fake_task(partition: int, addresses: list[str] | None, cpus: int = 1) -> Any:
    """A Spark task with GPUs."""
    gpus = {} if addresses is None else {"gpu": SimpleNamespace(addresses=addresses)}
    return SimpleNamespace(
        partitionId=lambda: partition,
        taskAttemptId=lambda: 100 + partition,
        cpus=lambda: cpus,
        resources=lambda: gpus,
    )


def test_the_ranks_of_a_task_follow_each_other_and_share_its_cores_and_gpus() -> None:
    found = assignments(fake_task(2, ["10", "9", "2"], cpus=7), 3)
    assert [each.rank for each in found] == [6, 7, 8]
    assert [each.gpu for each in found] == ["2", "9", "10"]
    assert {(each.task, each.attempt, each.cores) for each in found} == {(2, 102, 2)}


def test_a_task_alone_has_all_cores_and_a_gpu_if_spark_has_assigned_one() -> None:
    (first,) = assignments(fake_task(1, ["3"], cpus=4), 1)
    assert (first.rank, first.gpu, first.cores) == (1, "3", 4)
    (second,) = assignments(fake_task(1, None), 1)
    assert second.gpu is None
    assert [each.gpu for each in assignments(fake_task(0, None), 2)] == [None, None]


def test_a_part_of_a_gpu_is_all_that_its_process_may_see() -> None:
    part, whole = assignments(fake_task(0, ["MIG-77", "GPU-1"]), 2)[::-1]
    assert part.environment == {"CUDA_VISIBLE_DEVICES": "MIG-77"}
    assert whole.environment == {}
    assert device_index("MIG-77", "MIG-77", ["GPU-1"]) == 0


def own_process_of(
    addresses: list[str], monkeypatch: pytest.MonkeyPatch, *, apart: bool = False
) -> Any:
    """What a task of one rank starts a process for; the attributes of the call."""
    called: list[Any] = []
    monkeypatch.setattr(assignment.TaskContext, "get", lambda: fake_task(0, addresses))
    monkeypatch.setattr(assignment, "host_ranks", lambda calls, *_: called.extend(calls) or [])
    monkeypatch.setattr(accumulators.SparkFiles, "getRootDirectory", lambda: "/files")
    list(
        run_ranks(
            f"{__name__}:tell_gpu", InPieces((), b"argument"), (), 1, apart, None, {}, iter([])
        )
    )
    return called


def tell_gpu(argument: bytes, assigned: Any, batches: Any) -> bytes:
    return argument + f" {assigned.gpu}".encode()


def test_one_rank_runs_in_sparks_own_process_unless_that_would_not_see_its_part_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert own_process_of(["0"], monkeypatch) == []
    (call,) = own_process_of(["MIG-77"], monkeypatch)
    assert call.environment == {"CUDA_VISIBLE_DEVICES": "MIG-77"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-77")
    assert own_process_of(["MIG-77"], monkeypatch) == []


def test_a_rank_that_is_to_be_apart_gets_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (call,) = own_process_of(["0"], monkeypatch, apart=True)
    assert call.environment == {}


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # is taken away again
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    uuids = [uuid.removeprefix("GPU-") for uuid in UUIDS]
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuids[index])
    )


@pytest.mark.usefixtures("two_gpus")
def test_the_device_is_the_assigned_gpu_else_by_partition() -> None:
    assert choose_device("auto", "1", 0) == "cuda:1"
    assert choose_device("cuda", UUIDS[0], 1) == "cuda:0"
    found = [choose_device("auto", None, rank) for rank in range(4)]
    assert found == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert choose_device("cpu", "1", 0) == "cpu"
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.usefixtures("two_gpus")
def test_what_a_worker_cannot_use_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="device='cuda:2', but torch sees 2 GPUs"):
        choose_device("cuda:2", None, 0)
    with pytest.raises(ConfigError, match=r"assigned GPU 2 on .*, but torch sees 2 GPUs"):
        choose_device("auto", "2", 0)


def test_a_gpu_that_torch_cannot_use_is_warned_of_once_it_was_assigned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [choose_device("cpu", "1", 0), choose_device("auto", None, 0)] == ["cpu", "cpu"]
    assert not caplog.messages
    assert choose_device("auto", "MIG-77", 0) == "cpu"
    (message,) = caplog.messages
    assert "assigned GPU MIG-77" in message
    assert "a CUDA build of torch" in message


def test_two_ranks_on_one_gpu_are_an_error_that_names_them() -> None:
    places = [("a", "cuda:0", "w"), ("a", "cuda:1", "x"), ("b", "cuda:0", "y")]
    require_distinct_gpus(places)
    with pytest.raises(ConfigError, match="ranks 1 and 3 on a both use cuda:1"):
        require_distinct_gpus([*places, ("a", "cuda:1", "x")])
    require_distinct_gpus([("a", "cpu", None), ("a", "cpu", None)])


def test_a_gpu_is_the_same_whatever_number_it_has_in_each_process() -> None:
    """Executors of one host may see one GPU each, which is the first for both."""
    require_distinct_gpus([("a", "cuda:0", "x"), ("a", "cuda:0", "y")])
    with pytest.raises(ConfigError, match="ranks 0 and 1 on a both use cuda:1"):
        require_distinct_gpus([("a", "cuda:0", "x"), ("a", "cuda:1", "x")])


SESSION = """
import json
import sys
import sparkdl
from sparkdl import create_session
from sparkdl.errors import ConfigError

def gpu():
    from pyspark import TaskContext
    return TaskContext.get().resources()["gpu"].addresses

if __name__ == "__main__":
    a_task = {"spark.task.resource.gpu.amount": sys.argv[2]} if sys.argv[2] else {}
    create_session("gpus", master="local-cluster[1,3,1024]", conf=a_task | {
        "spark.executor.memory": "1024m",
        "spark.ui.enabled": "false",
        "spark.worker.resource.gpu.amount": "2",
        "spark.worker.resource.gpu.discoveryScript": sys.argv[1],
        "spark.executor.resource.gpu.amount": "2",
    }).sparkContext.setLogLevel("OFF")
    try:
        sparkdl.run(gpu, num_workers=3)
    except ConfigError as error:
        refused = str(error)
    print(json.dumps([sparkdl.run(gpu, num_workers=2), refused]))
"""


@pytest.mark.nightly
@pytest.mark.parametrize("a_task", ["1", "0.5", ""], ids=["whole", "shared", "not-asked-for"])
def test_spark_assigns_two_faked_gpus_to_two_ranks(tmp_path: Path, a_task: str) -> None:
    """On an executor of three cores, whatever the application's own settings ask for a task."""
    discovery = tmp_path / "discover.sh"
    discovery.write_text('#!/bin/sh\necho \'{"name": "gpu", "addresses": ["0", "1"]}\'\n')
    discovery.chmod(0o755)
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(SESSION))
    printed = printed_by(program, discovery, a_task)
    assigned, refused = json.loads(printed.strip().splitlines()[-1])
    assert sorted(assigned) == [["0"], ["1"]]
    assert "num_workers is 3" in refused
