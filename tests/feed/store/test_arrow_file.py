"""The store's files are Arrow's: whoever reads Arrow can read them while a worker has them open."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from every_row import every
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from toys import DTYPES

from sparkdl.feed.store import arrow_file
from sparkdl.feed.store.partition_store import PartitionStore
from sparkdl.protocols import ColumnSpec


def tables_of(store: PartitionStore) -> list[pa.Table]:
    """Each file of a store, opened by Arrow as another process would; nothing is copied."""
    store.take(torch.tensor([0]))
    files = [group._file.fileno() for group in store._groups]
    return [pa.ipc.open_file(pa.memory_map(f"/proc/self/fd/{f}")).read_all() for f in files]


def random_rows(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def bytes_of(values: Tensor) -> bytes:
    return values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    row_shape=st.lists(st.integers(1, 5), max_size=3).map(tuple),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
)
def test_arrow_reads_the_bytes_that_were_stored(
    dtype: torch.dtype, row_shape: tuple[int, ...], sizes: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = PartitionStore(Path(folder))
        batches = [random_rows(dtype, (rows, *row_shape), seed) for seed, rows in enumerate(sizes)]
        for batch in batches:
            store.append([ColumnSpec("x", dtype, row_shape)], [batch])
        (table,) = tables_of(store)
        assert table.num_rows == sum(sizes)
        (chunk,) = table["x"].chunks
        if row_shape:
            assert chunk.type.shape == list(row_shape)
            chunk = chunk.storage.values
        assert chunk.buffers()[1].slice(0, chunk.nbytes).to_pybytes() == bytes_of(
            torch.cat(batches)
        )
        assert table.field("x").metadata == {b"dtype": str(dtype).split(".")[1].encode()}
        store.close()


def test_numbers_side_by_side_are_a_tensor_named_after_their_columns(tmp_path: Path) -> None:
    store = PartitionStore(tmp_path)
    specs = [ColumnSpec(name, torch.float32) for name in ("distance", "delay", "hour")]
    columns = [torch.arange(100.0) + 1000 * index for index in range(3)]
    store.append(specs, columns)
    (table,) = tables_of(store)
    values = table["distance, delay, hour"].combine_chunks().to_numpy_ndarray()
    assert np.array_equal(values, torch.stack(columns, dim=1).numpy())
    store.close()


def test_rows_that_are_written_in_any_order_are_a_file_of_arrows_too(tmp_path: Path) -> None:
    store = PartitionStore(tmp_path)
    rows = torch.arange(60.0).view(20, 3)
    store.create([ColumnSpec("x", torch.float32, (3,))], 20)
    store.write([rows[10:]], 10)
    store.write([rows[:10]], 0)
    (table,) = tables_of(store)
    assert np.array_equal(table["x"].combine_chunks().to_numpy_ndarray(), rows.numpy())
    store.close()


@every("row_shape", [(), (16,), (3, 224, 224)])
def test_values_begin_on_a_page_and_are_not_copied_when_the_file_is_completed(
    tmp_path: Path, row_shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = arrow_file.ArrowFrame("x", torch.float32, row_shape)
    assert frame.start % 4096 == 0
    rows = torch.ones((50, *row_shape))
    added: list[int] = []
    put = arrow_file._put
    monkeypatch.setattr(
        arrow_file, "_put", lambda file, data, at: (added.append(len(data)), put(file, data, at))
    )
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        file.seek(frame.start)
        file.write(bytes_of(rows))
        file.flush()
        frame.put_around(file.fileno(), 50)
        table = pa.ipc.open_file(pa.memory_map(f"/proc/self/fd/{file.fileno()}")).read_all()
    assert table.num_rows == 50
    assert sum(added) < 3 * 4096
