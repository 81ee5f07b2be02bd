"""Arrays of every format are (channels, z, y, x) here, and other libraries read what is written."""

from __future__ import annotations

import itertools
import json
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import torch
import zarr
from every_row import every, every_row
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.errors import ConfigError, DataError, SparkDLError
from sparkdl.volumes.store import Volume, answered, created, require_apart, said, specification

SHAPE = (10, 12, 14)
FORMATS = ("zarr", "zarr3", "n5", "neuroglancer_precomputed")


def stored(path: Path | str, array: np.ndarray, driver: str = "zarr3", **options: Any) -> str:
    """An array by tensorstore, as it is there: N5 and precomputed arrays are turned round."""
    spec = {"driver": driver, "kvstore": {"driver": "file", "path": f"{path}/"}}
    turned = array.T if driver in ("n5", "neuroglancer_precomputed") else array
    store = ts.open(spec, create=True, dtype=array.dtype, shape=turned.shape, **options).result()
    store.write(turned).result()
    return str(path)


def values(seed: int = 0, shape: tuple[int, ...] = (2, *SHAPE)) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def everything(volume: Volume) -> Any:
    return volume.read(tuple((0, n) for n in volume.shape), torch.float64)


@pytest.fixture
def source(tmp_path: Path) -> Volume:
    return Volume.opened(stored(tmp_path / "in", values()), 3)


def new(place: Any, source: Volume, outputs: int = 2, *, labels: bool = False) -> Volume:
    return created(place, source, outputs, labels=labels, blocks=(5, 6, 7))


def trial(place: Any, source: Volume) -> Volume:
    return created(place, source, 2, labels=False, blocks=(5, 6, 7), trial=True)


@pytest.mark.parametrize("driver", FORMATS)
def test_an_array_of_any_format_is_read_with_its_channels_first(
    tmp_path: Path, driver: str
) -> None:
    array = values()
    volume = Volume.opened(stored(tmp_path / "in", array, driver), 3)
    assert (volume.driver, volume.channels, volume.shape) == (driver, 2, SHAPE)
    assert np.array_equal(everything(volume), array)
    part = volume.read(((1, 4), (2, 12), (3, 5)), torch.float64)
    assert np.array_equal(part, array[:, 1:4, 2:12, 3:5])


@pytest.mark.parametrize(("driver", "labels"), list(itertools.product(FORMATS, [False, True])))
def test_what_is_written_is_read_back_from_a_new_array_of_any_format(
    tmp_path: Path, driver: str, labels: bool
) -> None:
    source = Volume.opened(stored(tmp_path / "in", values(shape=(1, *SHAPE)), driver), 3)
    target = new(tmp_path / "out", source, labels=labels)
    assert target.driver == driver
    assert target.blocks == (5, 6, 7)
    written = torch.arange(2 * 10 * 12 * 14).reshape(2, *SHAPE).float()
    if labels:
        written = written[:1] % 2
    target.write(((0, 10), (0, 12), (0, 14)), written)
    again = Volume.opened(target.specification, 3)
    assert np.array_equal(everything(again), written.numpy())
    assert again.dtype == ("uint8" if labels else "float32")


@given(
    st.sampled_from(["zarr", "zarr3"]),
    st.tuples(*[st.integers(1, 9)] * 3),
    st.tuples(st.integers(1, 3), *[st.integers(1, 5)] * 3),
)
def test_what_is_written_block_by_block_is_read_back_whatever_the_blocks(
    driver: str, shape: tuple[int, ...], blocks: tuple[int, ...]
) -> None:
    """By reference, tensorstore 0.1.86 loses some blocks that have several channels."""
    specs = [
        {"driver": driver, "kvstore": {"driver": "memory", "path": f"{uuid.uuid4()}/"}}
        for _ in range(2)
    ]
    opened = ts.open(specs[0], create=True, dtype=ts.uint8, shape=shape).result()
    layout = {"chunk_layout": {"write_chunk": {"shape": blocks}}}
    spec = {**specs[1], "schema": layout, "context": {"memory_key_value_store": {}}}
    target = new(spec, Volume(opened, 3), 3)
    written = torch.from_numpy(values(shape=(3, *shape)))
    step = 2 * blocks[1]
    for start in range(0, shape[0], step):
        stop = min(shape[0], start + step)
        target.write(((start, stop), (0, shape[1]), (0, shape[2])), written[:, start:stop])
    assert np.array_equal(everything(target), written.numpy())


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
def test_zarr_reads_the_array_and_zeros_where_nothing_was_written(
    tmp_path: Path, driver: str
) -> None:
    source = Volume.opened(stored(tmp_path / "in", values(), driver), 3)
    target = new(tmp_path / "out", source)
    target.write(((0, 5), (0, 12), (0, 14)), torch.full((2, 5, 12, 14), 2.5))
    found: Any = zarr.open_array(tmp_path / "out", mode="r")
    assert (found.shape, found.dtype, found.chunks) == ((2, *SHAPE), "float32", (1, 5, 6, 7))
    assert (found[:, :5] == 2.5).all()
    assert (found[:, 5:] == 0).all()


@every("name", ["c", "C", "channel"])
def test_an_axis_that_is_named_channel_is_the_first_wherever_it_is(
    tmp_path: Path, name: str
) -> None:
    array = values()
    last, axes = np.moveaxis(array, 0, -1).copy(), ["z", "y", "x", name]
    zarr.create_array(tmp_path / "in", data=last, dimension_names=axes)
    volume = Volume.opened(tmp_path / "in", 3)
    assert (volume.channels, volume.shape) == (2, SHAPE)
    assert np.array_equal(everything(volume), array)


def test_a_precomputed_volume_keeps_its_place_and_its_resolution(tmp_path: Path) -> None:
    spec = {
        "driver": "neuroglancer_precomputed",
        "kvstore": f"file://{tmp_path}/in",
        "scale_metadata": {
            "resolution": [4, 5, 40],
            "size": [14, 12, 10],
            "voxel_offset": [100, 200, 300],
            "chunk_size": [7, 6, 5],
            "encoding": "raw",
        },
        "multiscale_metadata": {"type": "image", "data_type": "uint8", "num_channels": 1},
    }
    ts.open(spec, create=True).result()
    source = Volume.opened(f"file://{tmp_path}/in", 3)
    assert source.shape == SHAPE
    new(tmp_path / "out", source)
    (scale,) = json.loads((tmp_path / "out/info").read_text())["scales"]
    assert scale["voxel_offset"] == [100, 200, 300]
    assert scale["resolution"] == [4, 5, 40]
    assert scale["size"] == [14, 12, 10]


@every_row(
    ("out.zarr", "zarr", "zarr"),
    ("out.zarr", "zarr3", "zarr3"),
    ("out.zarr", "n5", "zarr3"),
    ("out.n5", "zarr3", "n5"),
    ("out.n5", "n5", "n5"),
    ("out", "n5", "n5"),
    ({"driver": "neuroglancer_precomputed"}, "zarr3", "neuroglancer_precomputed"),
)
def test_a_new_array_has_the_format_that_its_name_or_the_input_has(
    tmp_path: Path, name: Any, of_source: str, driver: str
) -> None:
    source = Volume.opened(stored(tmp_path / "in", values(), of_source), 3)
    named = isinstance(name, str)
    place = tmp_path / name if named else {**name, "kvstore": f"file://{tmp_path}/out"}
    assert new(place, source).driver == driver


def test_a_specification_decides_the_blocks_the_dtype_and_the_codec(
    tmp_path: Path, source: Volume
) -> None:
    spec = {
        "driver": "zarr",
        "kvstore": f"file://{tmp_path}/out",
        "dtype": "float16",
        "metadata": {"chunks": [2, 3, 4, 5], "compressor": {"id": "zlib", "level": 1}},
    }
    target = new(spec, source)
    assert target.blocks == (3, 4, 5)
    target.write(((0, 10), (0, 12), (0, 14)), torch.full((2, *SHAPE), 0.5))
    found: Any = zarr.open_array(tmp_path / "out", mode="r")
    assert (found.dtype, found.chunks) == ("float16", (2, 3, 4, 5))
    assert (found[:] == 0.5).all()


def test_the_blocks_of_a_sharded_array_are_its_shards(tmp_path: Path, source: Volume) -> None:
    layout = {"write_chunk": {"shape": [2, 10, 12, 14]}, "read_chunk": {"shape": [1, 5, 6, 7]}}
    spec = {"driver": "zarr3", "kvstore": f"file://{tmp_path}/out"}
    spec |= {"schema": {"chunk_layout": layout}}
    assert new(spec, source).blocks == (10, 12, 14)


@every_row((2, "uint8"), (256, "uint8"), (257, "uint16"), (70_000, "uint32"))
def test_labels_have_the_smallest_dtype_that_tells_them_apart(
    tmp_path: Path, source: Volume, outputs: int, dtype: str
) -> None:
    assert new(tmp_path / "out", source, outputs, labels=True).dtype == dtype


@every_row(
    ({"dtype": "int32"}, "an array of int32 cannot hold what the network returns"),
    ({"dtype": "uint8", "labels": 300}, "uint8 cannot hold labels below 300"),
    ({"driver": "nonsense"}, "cannot be created"),
    ({"metadata": {"chunks": [2, 3]}}, "cannot be created"),
)
def test_an_output_that_cannot_be_is_refused_in_words(
    tmp_path: Path, source: Volume, change: dict[str, Any], text: str | None
) -> None:
    spec = {"driver": "zarr", "kvstore": f"file://{tmp_path}/out", **change}
    labels = spec.pop("labels", 0)
    with pytest.raises(SparkDLError, match=text):
        new(spec, source, labels or 2, labels=labels > 0)


@pytest.mark.parametrize("driver", FORMATS)
def test_a_trial_writes_nothing_and_tells_the_blocks(tmp_path: Path, driver: str) -> None:
    source = Volume.opened(stored(tmp_path / "in", values(), driver), 3)
    for _ in range(2):
        assert trial(tmp_path / "out", source).blocks == (5, 6, 7)
        assert not (tmp_path / "out").exists()
    new(tmp_path / "out", source, labels=True)
    with pytest.raises(DataError, match="cannot be created"):
        trial(tmp_path / "out", source)


@pytest.mark.parametrize("driver", ["zarr", "zarr3", "n5"])
def test_an_array_without_any_block_holds_nothing(tmp_path: Path, driver: str) -> None:
    source = Volume.opened(stored(tmp_path / "in", values(), driver), 3)
    target = new(tmp_path / "out", source)
    assert not source.holds_nothing
    assert target.holds_nothing
    ts.open(target.specification).result()[...] = 1
    assert not target.holds_nothing


def test_an_output_and_its_input_must_be_apart(tmp_path: Path) -> None:
    source = Volume.opened(f"file://{stored(tmp_path / 'a' / 'in', values())}", 3)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(ConfigError, match="are one array"):
        require_apart(source, source)
    for place in ("a/in/out", "a", "link/in/c/out"):
        with pytest.raises(ConfigError, match=r"in the folder of the other"):
            require_apart(source, trial(tmp_path / place, source))
    for place in ("a/in2", "a/i", "a/out", "out"):
        require_apart(source, trial(tmp_path / place, source))


@every_row(
    ("nowhere", DataError, r"nowhere cannot be opened \(on .*detect format"),
    ("nonsense://x", DataError, r"x cannot be understood \(on .*unsupported URL scheme"),
    ({"driver": "zarr"}, DataError, "cannot be opened"),
    ("flat", ConfigError, "has 1 axes, .* give|Give as many sizes"),
)
def test_an_input_that_cannot_be_read_is_an_error_in_words(
    tmp_path: Path, place: Any, error: type[Exception], text: str
) -> None:
    stored(tmp_path / "flat", np.zeros(3, np.float32))
    where = tmp_path / place if place in ("nowhere", "flat") else place
    with pytest.raises(error, match=text):
        Volume.opened(where, 3)


def test_a_block_that_is_damaged_is_an_error_in_words(tmp_path: Path) -> None:
    stored(tmp_path / "in", values(), "zarr")
    (block, *_) = sorted((tmp_path / "in").glob("[0-9]*"))
    block.write_bytes(b"nonsense")
    volume = Volume.opened(tmp_path / "in", 3)
    with pytest.raises(DataError, match=r"in/ cannot be read \(on .*\): "):
        everything(volume)


def test_two_parts_of_an_array_are_told_apart_and_each_is_itself_again(tmp_path: Path) -> None:
    stored(tmp_path / "in", values())
    opened = ts.open(f"file://{tmp_path}/in").result()
    specs = [opened[:, part].spec().to_json() for part in (slice(0, 5), slice(5, 10))]
    first, second, again = (Volume.opened(specs[n], 3) for n in (0, 1, 0))
    assert first.shape == second.shape
    assert first.identity == again.identity != second.identity
    assert Volume.opened(first.specification, 3).identity == first.identity


def test_blocks_that_do_not_begin_at_the_corner_are_refused(tmp_path: Path) -> None:
    stored(tmp_path / "in", values(), chunk_layout=ts.ChunkLayout(chunk_shape=[1, 5, 6, 7]))
    spec = ts.open(f"file://{tmp_path}/in").result()[:, 2:].spec().to_json()
    with pytest.raises(ConfigError, match="do not begin at its corner"):
        _ = Volume.opened(spec, 3).blocks


@every_row(
    ("s3a://bucket/a.zarr", {"driver": "s3", "bucket": "bucket", "path": "a.zarr"}),
    ("s3://bucket/a.zarr", {"driver": "s3", "bucket": "bucket", "path": "a.zarr"}),
    ("gs://bucket/a.zarr", {"driver": "gcs", "bucket": "bucket", "path": "a.zarr"}),
    ("/data/a b%20c.zarr", {"driver": "file", "path": "/data/a b%20c.zarr/"}),
)
def test_urls_of_stores_and_paths_of_files_are_understood(
    given: str, understood: dict[str, str]
) -> None:
    assert specification(given)["kvstore"] == understood


def test_a_store_that_does_not_answer_is_told_with_the_seconds() -> None:
    _, never = ts.Promise.new()
    late = pytest.raises(DataError, match=r"in\.zarr cannot be read .*has not answered in 0 s")
    with late, said("read", "in.zarr"):
        answered(never, 0.01)


def test_headers_and_keys_of_a_store_are_not_told() -> None:
    store = {"driver": "http", "base_url": "http://127.0.0.1", "path": "in/"}
    store |= {"headers": ["Authorization: Bearer hush"], "secret_key": "hush"}
    with pytest.raises(DataError, match=r"127\.0\.0\.1.* cannot be opened") as refused:
        Volume.opened({"driver": "zarr", "kvstore": store}, 3)
    assert "hush" not in str(refused.value)
