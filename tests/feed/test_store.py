"""The partition store."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_rows import TOKENS, ragged
from torch import Tensor

from sparkdl.errors import TrainingError
from sparkdl.feed import stored_rows as rows_module
from sparkdl.feed.partition_store import PartitionStore
from sparkdl.feed.schema import Column, Ragged
from sparkdl.protocols import UNKNOWN, ColumnSpec, Padding

SPEC = ColumnSpec("x", torch.float32, (1024,))
MEMORY = Path("/dev/shm")

FILL_AND_WAIT = """
import sys, time
from pathlib import Path
import torch
from sparkdl.feed.partition_store import PartitionStore
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
            held = (os.stat(number) for number in Path(f"/proc/{worker.pid}/fd").iterdir())
            ours = [found for found in held if found.st_dev == device]
            # What has neither a name nor a process that holds it open, the kernel gives back.
            assert {(file.st_size >> 20, file.st_nlink) for file in ours} == {(16, 0)}
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

    monkeypatch.setattr(os, "pwritev", full)

    def refused(missing: int) -> Any:
        told = rf"do not fit into {tmp_path} on .*: 4 MiB of them are stored, {missing} bytes could"
        told += r" not be written, \d+ MiB are free \(No space left on device\).*storeIn"
        return pytest.raises(TrainingError, match=told)

    store.append([SPEC], [torch.ones(2, 1024)])
    with refused(8192):
        store.flush()
    with refused(2 << 20):
        store.append([SPEC], [torch.ones(510, 1024)])
    store.close()


class TestPartitionStore:
    """The store's files have no name and give back what was put in."""

    COLUMNS = (
        ColumnSpec("a", torch.float32, (3,)),
        ColumnSpec("b", torch.int64),
        ColumnSpec("c", torch.float64, (0,)),
    )

    def batch(self, rows: int) -> list[Tensor]:
        numbers = torch.arange(rows)
        return [
            torch.stack([numbers, numbers + 1, numbers + 2], dim=1).float(),
            numbers,
            torch.empty((rows, 0), dtype=torch.float64),
        ]

    def test_no_file_is_seen_even_while_open_and_closing_closes_all(self, tmp_path: Path) -> None:
        tokens = ColumnSpec("tokens", torch.int64, (UNKNOWN,), padding=Padding(0))
        sequences: list[Column] = [Ragged(torch.arange(3), torch.tensor([3, 0]))]
        before = len(list(Path("/proc/self/fd").iterdir()))
        tables = ((self.COLUMNS, [*self.batch(1000)]), ((tokens,), sequences))
        for specs, columns in tables:
            store = PartitionStore(tmp_path)
            store.append(specs, columns)
            store.take(torch.arange(2))
            assert list(tmp_path.iterdir()) == []
            groups = [*store._groups]  # nothing is closed by being forgotten
            store.close()
            assert groups
            assert list(tmp_path.iterdir()) == []
            assert len(list(Path("/proc/self/fd").iterdir())) == before

    @given(
        sizes=st.lists(st.integers(0, 30), min_size=1, max_size=5),
        page_bytes=st.sampled_from([16, 100, 2 << 20]),
    )
    @settings(max_examples=60)
    def test_rows_come_back_in_the_order_they_were_appended(
        self, sizes: list[int], page_bytes: int
    ) -> None:
        with (
            tempfile.TemporaryDirectory() as directory,
            mock.patch.object(rows_module, "PAGE_BYTES", page_bytes),
        ):
            store = PartitionStore(Path(directory))
            for size in sizes:
                store.append(self.COLUMNS, self.batch(size))
            columns = store.take(torch.arange(store.rows))
            assert store.rows == sum(sizes)
            for position, spec in enumerate(self.COLUMNS):
                expected = torch.cat([self.batch(size)[position] for size in sizes])
                assert columns[position].dtype is spec.dtype
                assert torch.equal(columns[position], expected)
            assert len(columns) == len(self.COLUMNS)
            store.close()

    def test_hundreds_of_columns_of_arrays_take_a_file_for_each_dtype(self, tmp_path: Path) -> None:
        before = len(list(Path("/proc/self/fd").iterdir()))
        shapes = [(2,), (1, 3), (0,)]
        specs = [
            ColumnSpec(f"c{i}", (torch.float32, torch.int64)[i % 2], shapes[i % 3])
            for i in range(700)
        ]
        batch: list[Column] = [
            torch.arange(5 * (spec.elements or 0)).add(i).view(5, *spec.row_shape).to(spec.dtype)
            for i, spec in enumerate(specs)
        ]
        store = PartitionStore(tmp_path)
        store.append(specs, batch)
        rows = torch.tensor([4, 0, 2])
        for taken, whole in zip(store.take(rows), batch, strict=True):
            assert isinstance(whole, Tensor)
            assert isinstance(taken, Tensor)
            assert taken.dtype is whole.dtype
            assert torch.equal(taken, whole[rows])
        assert len(list(Path("/proc/self/fd").iterdir())) <= before + 4  # opened and mapped
        store.close()

    def test_a_file_that_cannot_be_opened_is_told_with_the_limit_to_raise(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def exhausted(**_: object) -> None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        monkeypatch.setattr(tempfile, "TemporaryFile", exhausted)
        told = rf"file for its rows in {tmp_path} on .* \(Too many open files\).*ulimit -n"
        with pytest.raises(TrainingError, match=told):
            PartitionStore(tmp_path).append([SPEC], [torch.ones(1, 1024)])

    def test_without_rows_it_has_no_columns_and_a_slice_not_contiguous_is_stored_as_it_reads(
        self, tmp_path: Path
    ) -> None:
        store = PartitionStore(tmp_path)
        assert (store.rows, store.take(torch.arange(0))) == (0, [])
        values = torch.arange(12.0).view(2, 6).t()[::2]
        store.append([ColumnSpec("a", torch.float32, (2,))], [values])
        assert torch.equal(store.take(torch.arange(3))[0], values)
        store.close()


def test_the_first_readers_may_come_at_once_also_where_the_first_row_is_empty(
    tmp_path: Path,
) -> None:
    lengths = torch.arange(1000) % 5
    tokens = torch.arange(int(lengths.sum()))
    store = PartitionStore(tmp_path)
    spec = ColumnSpec("tokens", torch.int64, (UNKNOWN,), padding=Padding(0))
    store.append([spec], [Ragged(tokens, lengths)])
    store.take(torch.zeros(1, dtype=torch.int64))
    mapped = list[str]()

    def slowly(*arguments: Any, **how: Any) -> Any:
        time.sleep(0.02)  # for the others to come
        mapped.append(threading.current_thread().name)
        return mmap.mmap(*arguments, **how)

    together = threading.Barrier(8, timeout=60)

    def read(_: int) -> Any:
        together.wait()
        return store.take(torch.arange(1000))[0]

    slow = mock.Mock(mmap=slowly, ACCESS_READ=mmap.ACCESS_READ)
    with mock.patch.object(rows_module, "mmap", slow), ThreadPoolExecutor(8) as readers:
        taken = list(readers.map(read, range(8), timeout=60))
    assert len(mapped) == 1
    assert all(torch.equal(rows.values, tokens) for rows in taken)
    store.close()


class TestStore:
    """Rows in two files: of values, and of where each row is."""

    @settings(max_examples=60)
    @given(
        rows=st.lists(st.lists(st.integers(0, 99), max_size=7), min_size=1, max_size=30),
        data=st.data(),
    )
    def test_rows_written_in_any_order_come_back(
        self, rows: list[list[float]], data: st.DataObject
    ) -> None:
        chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=40))
        firsts = data.draw(st.permutations(range(0, len(rows), 3)))
        with tempfile.TemporaryDirectory() as name:
            store = PartitionStore(Path(name))
            store.create([TOKENS], len(rows))
            for first in firsts:
                store.write([ragged(rows[first : first + 3])], first)
            (column,) = store.take(torch.tensor(chosen, dtype=torch.int64))
            (counts,) = store.lengths()
            store.close()
        assert isinstance(column, Ragged)
        assert column.lengths.tolist() == [len(rows[k]) for k in chosen]
        assert column.values.tolist() == [number for k in chosen for number in rows[k]]
        assert counts.tolist() == [len(row) for row in rows]
