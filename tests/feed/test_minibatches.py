"""The way to a GPU, as far as a machine without one can follow it, and what is made ahead."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from feeds import SCHEMA, record_batches
from torch import Tensor

from sparkdl.feed import minibatches
from sparkdl.feed.feed import Feed
from sparkdl.feed.minibatches import DeviceChunk, prefetched
from sparkdl.feed.store.partition_store import PartitionStore

PREFETCHER = "sparkdl-prefetch"
NO_EVENT: Any = None


def test_for_a_gpu_rows_are_gathered_into_pinned_memory_and_sent_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    take = PartitionStore.take

    def gather(store: PartitionStore, rows: Tensor, *, pinned: bool = False) -> list[Tensor]:
        assert pinned
        log.append(f"gathered by {threading.current_thread().name}")
        return take(store, rows)  # pinned memory needs a GPU

    class Chunk(DeviceChunk):
        def ready(self) -> list[Tensor]:
            log.append("used")
            assert threading.current_thread() is threading.main_thread()
            return self.columns

    def send(tensors: list[Tensor], device: torch.device) -> DeviceChunk:
        assert device.type == "cuda"
        assert threading.current_thread().name == PREFETCHER
        return Chunk(tensors, NO_EVENT)

    def epochs(device: str) -> list[list[int]]:
        with Feed(SCHEMA, batch_size=4, seed=1, rank=0, directory=tmp_path, device=device) as feed:
            feed.fill(record_batches([30, 12]))
            return [[int(i) for b in feed.epoch(e) for i in b.targets] for e in (1, 2, 3)]

    expected = epochs("cpu")
    monkeypatch.setattr(minibatches, "CHUNK_BYTES", 64)
    monkeypatch.setattr(PartitionStore, "take", gather)
    monkeypatch.setattr(minibatches, "to_gpu", send)

    assert epochs("cuda") == expected
    assert log.count("used") == log.count(f"gathered by {PREFETCHER}") > 30
    assert not [t for t in threading.enumerate() if t.name == PREFETCHER]


def test_copies_on_their_way_are_waited_for_and_kept_by_the_stream_that_uses_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[Any] = []
    stream = SimpleNamespace(wait_event=lambda event: log.append(("wait for", event)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    tensors: list[Any] = [
        SimpleNamespace(device="cuda:0", record_stream=lambda s, k=k: log.append((k, s)))
        for k in ("first", "second")
    ]
    event: Any = "the event"

    assert DeviceChunk(tensors, event).ready() is tensors
    assert log == [("wait for", event), ("first", stream), ("second", stream)]


def test_on_a_cpu_rows_are_where_they_were_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Tensor] = []
    take = PartitionStore.take

    def gather(store: PartitionStore, rows: Tensor, *, pinned: bool = False) -> list[Any]:
        columns: list[Any] = take(store, rows, pinned=pinned)
        taken.extend(columns)
        return columns

    monkeypatch.setattr(PartitionStore, "take", gather)
    with Feed(SCHEMA, batch_size=4, seed=1, rank=0, directory=tmp_path) as feed:
        feed.fill(record_batches([4]))
        (batch,) = feed.epoch(1)
    assert [batch.features[0].data_ptr(), batch.targets.data_ptr()] == [  # type: ignore[index,union-attr]
        each.data_ptr() for each in taken
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gets_the_same_rows_from_pinned_memory(tmp_path: Path) -> None:
    pinned = PartitionStore(tmp_path)
    pinned.append(SCHEMA.of_lengths([2, None]).stored, [torch.rand(9, 2), torch.arange(9)])
    assert all(column.is_pinned() for column in pinned.take(torch.arange(9), pinned=True))
    pinned.close()
    found = []
    for device in ("cpu", "cuda"):
        with Feed(SCHEMA, batch_size=4, seed=1, rank=0, directory=tmp_path, device=device) as feed:
            feed.fill(record_batches([500]))
            found.append([b.targets for b in feed.epoch(2)])
    assert all(t.is_cuda for t in found[1])
    assert torch.equal(torch.cat(found[0]), torch.cat(found[1]).cpu())


def test_items_come_in_order_and_an_error_in_its_place() -> None:
    def source() -> Any:
        yield from range(20)
        raise ZeroDivisionError("at 20")

    items = prefetched(source())
    assert [next(items) for _ in range(20)] == list(range(20))
    with pytest.raises(ZeroDivisionError, match="at 20"):
        next(items)


def test_no_more_than_a_few_items_are_made_ahead() -> None:
    made: list[int] = []

    def source() -> Any:
        for item in range(1000):
            made.append(item)
            yield item

    items = prefetched(source())
    for _ in range(5):
        next(items)
    items.close()
    assert len(made) <= 5 + 4


def test_closing_early_ends_the_thread_and_the_source() -> None:
    items = prefetched(iter(range(10**9)))
    next(items)
    items.close()
    assert not [t for t in threading.enumerate() if t.name == "sparkdl-prefetch"]
