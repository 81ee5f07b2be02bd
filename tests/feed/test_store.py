"""Where the partition store keeps its rows: without a name, and not beyond the room there is."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparkdl.errors import TrainingError
from sparkdl.feed.store import PartitionStore
from sparkdl.protocols import ColumnSpec

SPEC = ColumnSpec("x", torch.float32, (1024,))
MEMORY = Path("/dev/shm")

FILL_AND_WAIT = """
import sys, time
from pathlib import Path
import torch
from sparkdl.feed.store import PartitionStore
from sparkdl.protocols import ColumnSpec

store = PartitionStore(Path(sys.argv[1]))
store.append([ColumnSpec("x", torch.float32, (1024,))], [torch.ones(4096, 1024)])
assert store.take(torch.tensor([7]))[0].sum() == 1024
print("full", flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not MEMORY.is_mount(), reason="this system has no /dev/shm")
def test_rows_in_memory_have_no_name_that_could_outlive_a_killed_worker() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FILL_AND_WAIT, str(MEMORY)], stdout=subprocess.PIPE, text=True
    ) as worker:
        try:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "full\n"
            device = MEMORY.stat().st_dev
            ours = [
                found
                for number in Path(f"/proc/{worker.pid}/fd").iterdir()
                if (found := os.stat(number)).st_dev == device
            ]
            # What has neither a name nor a process that holds it open, the kernel gives back.
            assert {(file.st_size, file.st_nlink) for file in ours} == {(16 << 20, 0)}
            inode = ours[0].st_ino
        finally:
            worker.send_signal(signal.SIGKILL)
    assert inode not in {entry.inode() for entry in os.scandir(MEMORY)}


def test_rows_for_which_there_is_no_room_are_refused_with_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PartitionStore(tmp_path)
    store.append([SPEC], [torch.ones(1024, 1024)])

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(
        TrainingError,
        match=rf"do not fit into {tmp_path} on .*: 4 MiB of them are there, 8192 bytes could not "
        r"be written, \d+ MiB are free \(No space left on device\).*storeIn",
    ):
        store.append([SPEC], [torch.ones(2, 1024)])
    store.close()
