"""``model.transform_volume`` predicts an array on executors, goes on where it was, or refuses."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from every_row import every, every_row
from frames import no_jobs
from pyspark.sql import SparkSession
from test_volume_stores import stored
from torch import Tensor, nn
from volume_case import Edges, Fails, Named, Shape, sliding_window

from sparkdl import TorchModel
from sparkdl.durable import lease
from sparkdl.errors import ConfigError, DataError, InUseError, ModelError, SetupError, SparkDLError
from sparkdl.volumes import run
from sparkdl.volumes.grid import Patches
from sparkdl.volumes.records import alone

SHAPE = (20, 24, 28)
SIZES = {"patch": (6, 8, 8), "overlap": (2, 4, 4)}
CHUNK = (8, 12, 28)


def model_of(module: nn.Module, *shape: int, **params: Any) -> TorchModel:
    return TorchModel.from_module(module, torch.zeros(1, *(shape or (1, 6, 8, 8))), **params)


def image(shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.random.default_rng(0).integers(1, 255, shape).astype(np.uint8)


def expected(array: np.ndarray, module: nn.Module) -> np.ndarray:
    patches = Patches(array.shape[1:], SIZES["patch"], SIZES["overlap"], (0, 0, 0))

    def outputs(patch: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return module(torch.from_numpy(patch[None]).float())[0].numpy()

    return sliding_window(array, patches, outputs)


def read(path: Path) -> np.ndarray:
    return zarr.open_array(path, mode="r")[:]


@pytest.fixture
def source(tmp_path: Path) -> str:
    return stored(tmp_path / "in.zarr", image())


@pytest.mark.usefixtures("spark")
@pytest.mark.nightly_variants
@pytest.mark.parametrize("chunk", [CHUNK, "auto"])
def test_the_output_is_what_a_sliding_window_over_the_whole_array_gives(
    tmp_path: Path, source: str, chunk: Any
) -> None:
    module = Edges()
    done = model_of(module).transform_volume(source, tmp_path / "out.zarr", chunk=chunk, **SIZES)
    found = read(tmp_path / "out.zarr")
    assert found.dtype == "float32"
    assert np.abs(found - expected(image()[None], module)).max() < 1e-3  # of values up to 100
    assert done.computed == done.chunks == {CHUNK: 6, "auto": done.chunks}[chunk]
    assert done.skipped == 0
    assert done.voxels == np.prod(SHAPE)
    assert done.voxels_per_second > 0


@pytest.mark.usefixtures("spark")
def test_what_is_done_is_not_done_again(tmp_path: Path, source: str) -> None:
    model, target = model_of(Edges()), tmp_path / "out.zarr"
    first = model.transform_volume(source, target, chunk=CHUNK, **SIZES)
    before = read(target)
    (target / ".sparkdl/chunks/2").unlink()
    torn = target / ".sparkdl/chunks/4"
    torn.write_bytes(torn.read_bytes()[:-9])
    for chunk in (2, 4):  # as if their blocks were half written
        for path in (target / "c/0").glob(f"{chunk // 2}/{chunk % 2}/*"):
            path.unlink()
    assert not np.array_equal(read(target), before)
    again = model.transform_volume(source, target, **SIZES)
    assert (again.chunks, again.computed, again.chunk) == (6, 2, CHUNK)
    assert np.array_equal(read(target), before)
    last = model.transform_volume(source, target, chunk=CHUNK, **SIZES)
    assert (last.computed, last.patches, last.voxels_per_second) == (0, 0, 0.0)
    assert first.patches > again.patches > 0


@pytest.mark.usefixtures("spark")
def test_a_chunk_is_not_done_if_its_last_block_cannot_be_written(
    tmp_path: Path, source: str
) -> None:
    model, target = model_of(Edges()), tmp_path / "out.zarr"
    model.transform_volume(source, target, chunk=CHUNK, **SIZES)
    before, marker = read(target), target / ".sparkdl/chunks/2"
    marker.unlink()
    # Chunk 2 is one block of each channel. No file can take the place of a folder.
    block = max((target / "c").iterdir()) / "1/0/0"
    block.unlink()
    (block / "in the way").mkdir(parents=True)
    with pytest.raises(DataError, match=r"out\.zarr/ cannot be written"):
        model.transform_volume(source, target, chunk=CHUNK, **SIZES)
    assert not marker.exists()
    shutil.rmtree(block)
    assert model.transform_volume(source, target, chunk=CHUNK, **SIZES).computed == 1
    assert np.array_equal(read(target), before)


@pytest.mark.usefixtures("spark")
@every("driver", ["zarr", "zarr3"])
def test_what_was_deleted_but_for_hidden_files_is_computed_again(
    tmp_path: Path, driver: str
) -> None:
    source, target = stored(tmp_path / "in", image(), driver), tmp_path / "out"
    model = model_of(Edges())
    model.transform_volume(source, target, chunk=CHUNK, **SIZES)
    before = read(target)
    for path in target.glob("[!.]*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    again = model.transform_volume(source, target, chunk=CHUNK, **SIZES)
    assert again.computed == again.chunks == 6
    assert np.array_equal(read(target), before)


@pytest.mark.usefixtures("spark")
def test_another_job_for_the_same_output_is_refused(tmp_path: Path, source: str) -> None:
    target = tmp_path / "out.zarr"
    model = model_of(Edges())
    model.transform_volume(source, target, chunk=CHUNK, **SIZES)
    retrained = Edges()
    with torch.no_grad():
        next(retrained.parameters()).mul_(1.5)
    with pytest.raises(ConfigError, match=r"something else: model was Edges \w+, is Edges"):
        model_of(retrained).transform_volume(source, target, **SIZES)
    for change, text in [
        ({"patch": (6, 8, 9)}, r"patch was \[6, 8, 8\], is \[6, 8, 9\]"),
        ({"chunk": (8, 24, 28)}, r"chunk was \[8, 12, 28\], is \[8, 24, 28\]"),
        ({"overlap": (2, 4, 5)}, r"overlap was \[2, 4, 4\], is \[2, 4, 5\]"),
        ({"crop": (1, 1, 2)}, r"crop was \[0, 0, 0\], is \[1, 1, 2\]"),
        ({"skip": None}, "skip was zeros, is None"),
        ({"reduce": "argmax"}, "reduce was None, is argmax"),
    ]:
        with pytest.raises(ConfigError, match=text):
            model.transform_volume(source, target, **{**SIZES, **change})


@pytest.mark.usefixtures("spark")
def test_chunks_whose_input_has_changed_are_computed_again(tmp_path: Path, source: str) -> None:
    module, target = Edges(), tmp_path / "out.zarr"
    model, changed = model_of(module), image()
    model.transform_volume(source, target, chunk=CHUNK, **SIZES)
    for change, missing, computed in (
        ([(0, 0, 0), (19, 23, 27)], [2], 4),  # between a crash and the next call
        ([(10, 12, 14)], [], 2),  # which patches of two chunks read
        ([], [], 0),  # the files are other ones, with the same numbers
    ):
        for voxel in change:
            changed[voxel] += 1
        zarr.open_array(source, mode="r+")[:] = changed
        for number in missing:
            (target / f".sparkdl/chunks/{number}").unlink()
        again = model.transform_volume(source, target, **SIZES)
        assert (again.computed, again.chunks) == (computed, 6)
        assert np.abs(read(target) - expected(changed[None], module)).max() < 1e-3


@pytest.mark.usefixtures("spark")
def test_an_input_that_changes_during_the_call_is_told(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = run._computed

    def and_change(*args: Any) -> Any:
        done = compute(*args)
        zarr.open_array(source, mode="r+")[0, 0, 0] = 0
        return done

    model, target = model_of(Edges()), tmp_path / "out.zarr"
    with monkeypatch.context() as patch:
        patch.setattr(run, "_computed", and_change)
        with pytest.raises(DataError, match="was written to while"):
            model.transform_volume(source, target, chunk=CHUNK, **SIZES)
    assert model.transform_volume(source, target, **SIZES).computed == 1


@pytest.mark.usefixtures("spark")
def test_an_output_that_another_call_is_writing_is_refused(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "GRACE_S", 0.0)
    target, model = tmp_path / "out.zarr", model_of(Edges())
    with alone(target, "another"), pytest.raises(InUseError, match=r"written by .*\(another\)"):
        model.transform_volume(source, target, chunk=CHUNK, **SIZES)
    model.transform_volume(source, target, chunk=CHUNK, **SIZES)


@pytest.mark.usefixtures("spark")
@pytest.mark.versions
def test_labels_are_the_largest_channel_and_zeros_are_skipped(tmp_path: Path) -> None:
    array = image()
    array[:8] = 0
    source, module = stored(tmp_path / "in.zarr", array), Edges()
    target, how = tmp_path / "labels.zarr", {"chunk": (4, 24, 28), "reduce": "argmax"}
    done = model_of(module).transform_volume(source, target, **how, **SIZES)
    blended = expected(array[None], module)
    found = read(target)
    assert (found.shape, found.dtype) == (SHAPE, "uint8")
    assert np.array_equal(found[8:], blended.argmax(0)[8:])
    assert not found[:4].any()
    assert (done.chunks, done.skipped) == (5, 1)


@pytest.mark.usefixtures("spark")
def test_an_output_that_is_smaller_than_its_patch_is_taken_from_the_middle(tmp_path: Path) -> None:
    array = image((2, 40, 50)).astype(np.float32)
    source = stored(tmp_path / "in.n5", array, "n5")
    params: Any = {"featuresAs": "dict", "outputCols": {"prediction": "inner"}}
    model = TorchModel.from_module(Named(), {"raw": torch.zeros(1, 2, 16, 16)}, **params)
    target = tmp_path / "out.zarr"
    model.transform_volume(source, target, patch=(16, 16), overlap=(6, 8), chunk=(20, 50))
    assert np.abs(read(target) - 2 * array).max() < 1e-3
    with pytest.raises(ConfigError, match=r"crop=\(1, 3\), but the model's output is \(2, 3\)"):
        model.transform_volume(source, target, patch=(16, 16), overlap=(6, 8), crop=(1, 3))
    with pytest.raises(ConfigError, match="leave gaps"):
        model.transform_volume(source, target, patch=(16, 16), overlap=(6, 4))


@pytest.mark.usefixtures("spark")
def test_what_the_model_raises_on_an_executor_is_told_and_the_rest_need_not_be_done_again(
    tmp_path: Path,
) -> None:
    array = image()
    array[1, 1, 1] = 255
    source, model = stored(tmp_path / "in.zarr", array), model_of(Fails())
    target = tmp_path / "out.zarr"
    with pytest.raises(ModelError, match=r"fails on 18 rows.*the user's own mistake"):
        model.transform_volume(source, target, chunk=CHUNK, **SIZES)
    assert not (target / ".sparkdl/chunks/0").exists()
    repaired = model_of(Edges())
    with pytest.raises(ConfigError, match=r"model was Fails \w+, is Edges"):
        repaired.transform_volume(source, target, **SIZES)


@every_row(
    (lambda patch: patch[:, :, 1:], r"returns \(5, 8, 8\) for a patch of \(6, 8, 8\)"),
    (lambda patch: patch.mean((2, 3, 4)), "with as many axes"),
    (lambda patch: patch[:, :0], "with as many axes"),
    (lambda patch: patch / 0 if patch.shape[0] > 1 else [][0], "list index out of range"),
    (lambda patch: patch.argmax(1, keepdim=True), r"returns int64, .* reduce='argmax'"),
    (lambda patch: patch > 0, "returns bool, .* have no mean"),
    (lambda patch: patch.byte(), "returns uint8, .* have no mean"),
    (lambda patch: patch.to(torch.complex64), "returns complex64"),
    (lambda patch: patch.double() + 1e39, r"returns 1e\+39 \(float64\), which float32"),
)
def test_a_model_whose_output_is_no_part_of_the_array_is_refused_before_any_task(
    tmp_path: Path, spark: SparkSession, change: Callable[[Tensor], Any], text: str
) -> None:
    source = stored(tmp_path / "in.zarr", image())
    model = model_of(Edges())
    model.module = Shape(change)
    with no_jobs(spark), pytest.raises(ModelError, match=text):
        model.transform_volume(source, tmp_path / "out.zarr", **SIZES)
    assert not (tmp_path / "out.zarr").exists()


@every_row(
    ({"patch": (6, 8)}, "patch sizes for 2 axes|overlap must be 2"),
    ({"patch": 6}, "patch must be two or three whole numbers"),
    ({"patch": (6, 8, 0)}, "patch must be a whole number >= 1, got 0"),
    ({"overlap": (2, 4)}, "overlap must be 3 whole numbers"),
    ({"overlap": (6, 4, 4)}, "leave gaps or never end"),
    ({"overlap": (2, 4.5, 4)}, "overlap must be a whole number"),
    ({"crop": (2, 0, 0)}, "leave gaps or never end"),
    ({"chunk": (1, 24, 28)}, "smaller than overlap"),
    ({"chunk": (1, 24, 28), "reduce": "argmax"}, "smaller than overlap"),
    ({"chunk": "large"}, "chunk must be 'auto' or 3 whole numbers"),
    ({"reduce": "mean"}, "reduce must be 'argmax' or None, got 'mean'"),
    ({"skip": "ones"}, "skip must be 'zeros' or None"),
)
def test_arguments_that_do_not_fit_are_refused_before_any_task(
    tmp_path: Path, spark: SparkSession, change: dict[str, Any], text: str
) -> None:
    source = stored(tmp_path / "in.zarr", image())
    with no_jobs(spark), pytest.raises(ConfigError, match=text):
        model_of(Edges()).transform_volume(source, tmp_path / "out.zarr", **{**SIZES, **change})
    assert not (tmp_path / "out.zarr").exists()  # so that it decides nothing about another try


@pytest.mark.usefixtures("spark")
def test_a_chunk_that_does_not_divide_into_the_outputs_blocks_is_refused(
    tmp_path: Path, source: str
) -> None:
    layout = {"chunk_layout": {"write_chunk": {"shape": [1, 5, 8, 8]}}}
    spec = {"driver": "zarr3", "kvstore": f"file://{tmp_path}/out.zarr", "schema": layout}
    model = model_of(Edges())
    with pytest.raises(ConfigError, match=r"no multiple of the output's blocks of \(5, 8, 8\)"):
        model.transform_volume(source, spec, chunk=(8, 24, 28), **SIZES)
    assert not (tmp_path / "out.zarr").exists()
    done = model.transform_volume(source, spec, chunk=(10, 24, 28), **SIZES)
    assert done.chunks == 2


@every_row(
    (image((2, *SHAPE)), 3, {}, {}, "has 2 channels and 3 axes"),
    (image().astype(np.complex64), 3, {}, {}, "real numbers"),
    (image(), 3, {"outputType": "probability"}, {}, "outputType='probability'"),
    (image(), 1, {}, {"reduce": "argmax"}, "returns only one"),
)
def test_an_input_or_a_model_that_does_not_fit_is_refused_before_any_task(
    tmp_path: Path, spark: SparkSession, array: Any, outputs: int, params: Any, how: Any, text: str
) -> None:
    model = model_of(Edges(outputs=outputs))
    model._set(**params)
    source = stored(tmp_path / "in", array, "zarr")
    with no_jobs(spark), pytest.raises(SparkDLError, match=text):
        model.transform_volume(source, tmp_path / "out", **how, **SIZES)


def test_without_tensorstore_the_error_says_what_to_install(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tensorstore", None)
    with pytest.raises(SetupError, match=r"pip install 'sparkdl-torch\[volumes\]'"):
        model_of(Edges()).transform_volume(tmp_path / "in", tmp_path / "out", **SIZES)


@pytest.mark.usefixtures("spark")
def test_the_model_of_the_driver_is_as_it_was(tmp_path: Path, source: str) -> None:
    module = nn.Sequential(nn.BatchNorm3d(1), nn.Dropout(0.5)).train()
    model = model_of(module)
    before = {name: each.clone() for name, each in module.state_dict().items()}
    state = torch.random.get_rng_state()
    model.transform_volume(source, tmp_path / "out", progress=False, **SIZES)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(each, before[name]) for name, each in module.state_dict().items())


@pytest.mark.usefixtures("spark")
def test_a_bar_that_cannot_be_shown_ends_nothing(
    tmp_path: Path,
    source: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError("no terminal")

    monkeypatch.setattr(run.tqdm, "update", broken)
    with caplog.at_level(logging.WARNING):
        model_of(Edges()).transform_volume(source, tmp_path / "out", chunk=CHUNK, **SIZES)
    assert "the progress bar is left out: OSError: no terminal" in caplog.text
