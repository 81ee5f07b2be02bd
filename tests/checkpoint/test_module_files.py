"""A module's files: weights, and what is said of its columns, loss and metrics; no Spark."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from every_row import every, every_row
from models import Net
from safetensors.torch import load_file
from torch import nn

from sparkdl import EpochSummary, load_module
from sparkdl.checkpoint.module_files import SavedModule, read_module, write_module
from sparkdl.checkpoint.tensor_file import write_tensors
from sparkdl.encodings import PIXELS
from sparkdl.encodings.any_size import FITS
from sparkdl.encodings.scale import Scale
from sparkdl.errors import ConfigError, SparkDLError
from sparkdl.protocols import UNKNOWN, ColumnSpec, Padding

EPOCH: Any = {"examples": 10, "rounds": 3, "seconds": 0.25}
HISTORY = [
    EpochSummary(epoch=1, loss=0.5, **EPOCH),
    EpochSummary(epoch=2, loss=float("inf"), mean_staleness=1.5, max_staleness=4, **EPOCH),
]
FEATURES = (ColumnSpec("features", torch.float32, (4,)), ColumnSpec("carrier", torch.int64))


def write(module: nn.Module, builder: Any, directory: Path) -> None:
    write_module(SavedModule(module, builder, FEATURES, "logits", {None: 3}, HISTORY), directory)


def same_state(first: nn.Module, second: nn.Module) -> bool:
    mine, other = first.state_dict(), second.state_dict()
    return mine.keys() == other.keys() and all(
        mine[k].dtype == other[k].dtype and torch.equal(mine[k], other[k]) for k in mine
    )


def test_everything_comes_back_and_weights_are_plain_safetensors(tmp_path: Path) -> None:
    module = Net()
    write(module, Net, tmp_path)
    loaded = read_module(tmp_path, trust=["models"])
    assert same_state(loaded.module, module)
    assert loaded.builder is Net
    assert loaded.features == FEATURES
    assert (loaded.head, loaded.widths) == ("logits", {None: 3})
    assert list(loaded.history) == HISTORY
    assert not loaded.module.training
    assert load_file(tmp_path / "module.safetensors").keys() == module.state_dict().keys()


class Counting(Net):
    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}


def test_a_state_that_is_no_tensor_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'_extra_state' in its state is a dict.*get_extra_st"):
        write(Counting(), Counting, tmp_path)


class WithCaches(nn.Module):
    """Has buffers that are no part of its state, each of another dtype than the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        self.register_buffer("table", torch.linspace(0.001, 3, 8).sin(), persistent=False)
        self.register_buffer("drawn", torch.randn(8, dtype=torch.float64), persistent=False)
        turns = torch.polar(torch.ones(8), torch.linspace(0, 3, 8))
        self.register_buffer("turns", turns, persistent=False)
        self.register_buffer("wide_turns", turns.to(torch.complex128), persistent=False)
        self.register_buffer("made_later", None, persistent=False)


def test_buffers_that_are_no_part_of_the_state_come_back_as_they_were(tmp_path: Path) -> None:
    module = WithCaches()
    module.made_later = torch.ones(3)
    write(module, WithCaches, tmp_path)
    loaded = load_module(tmp_path, trust=[__name__])
    assert same_state(loaded, module)
    for name in ("table", "drawn", "turns", "wide_turns"):
        mine, other = module.get_buffer(name), loaded.get_buffer(name)
        assert mine.dtype == other.dtype, name
        assert torch.equal(mine, other), name
    assert loaded.made_later is None
    (tmp_path / "buffers.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match="are damaged"):
        read_module(tmp_path, trust=True)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.decoder = nn.Linear(4, 4)
        self.decoder.weight = self.encoder.weight


def test_tied_parameters_come_back_tied(tmp_path: Path) -> None:
    module = Tied()
    write(module, Tied, tmp_path)
    loaded = load_module(tmp_path, trust=[__name__])
    assert same_state(loaded, module)
    assert loaded.get_parameter("decoder.weight") is loaded.get_parameter("encoder.weight")


def test_parameters_that_are_views_of_one_buffer_are_saved_each_by_itself(tmp_path: Path) -> None:
    flat = torch.arange(15.0)
    module = nn.Linear(4, 3)
    module.weight.data, module.bias.data = flat[:12].view(3, 4), flat[12:]
    write(module, partial(nn.Linear, 4, 3), tmp_path)
    assert same_state(load_module(tmp_path), module)


def test_loading_leaves_the_random_state_as_it_was(tmp_path: Path) -> None:
    write(Net(), Net, tmp_path)
    before = torch.random.get_rng_state()
    load_module(tmp_path, trust=["models"])
    assert torch.equal(torch.random.get_rng_state(), before)


def test_several_outputs_come_back_by_name_and_position_and_no_other_key_does(
    tmp_path: Path,
) -> None:
    widths = {None: 3, "logits": 3, 0: None}
    write_module(SavedModule(Net(), Net, FEATURES, "unknown", widths, HISTORY), tmp_path)
    assert read_module(tmp_path, trust=["models"]).widths == widths
    for key in (-1, True, 1.0, ["logits"]):
        with pytest.raises(ConfigError, match="an entry of outputs is invalid"):
            read_changed(tmp_path, (), {"outputs": [{"key": key, "width": 3}]})


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no saved model in .*module\.json is missing"):
        load_module(tmp_path)


@every_row((99, "format 99, newer than the 4"), (3, "format 3, .* only format 4"))
def test_another_format_is_refused_with_both_numbers(
    tmp_path: Path, number: int, words: str
) -> None:
    write(Net(), Net, tmp_path)
    path = tmp_path / "module.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": number}))
    with pytest.raises(ConfigError, match=words):
        load_module(tmp_path)


@every("damage", ["no weights", "cut weights", "cut description", "foreign description"])
def test_damaged_files_are_refused_by_name_and_place(tmp_path: Path, damage: Any) -> None:
    write(Net(), Net, tmp_path)
    weights, description = tmp_path / "module.safetensors", tmp_path / "module.json"
    if damage == "no weights":
        weights.unlink()
    elif damage == "cut weights":
        weights.write_bytes(weights.read_bytes()[:-20])
    elif damage == "cut description":
        description.write_text(description.read_text()[:-20])
    else:
        description.write_text("{}")
    with pytest.raises(SparkDLError) as caught:
        load_module(tmp_path, trust=["models"])
    name = weights.name if "weights" in damage else description.name
    assert name in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_weights_of_another_architecture_are_refused(tmp_path: Path) -> None:
    write(Net(), partial(Net, width=5), tmp_path)
    with pytest.raises(SparkDLError, match="size mismatch"):
        load_module(tmp_path, trust=["models"])


def test_a_model_built_with_lazy_layers_comes_back_with_its_values(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Linear(8, 3))

    module = build()
    module(torch.randn(5, 4))
    write(module.eval(), build, tmp_path)
    found = read_module(tmp_path, trust=True).module
    assert same_state(found, module)
    features = torch.randn(2, 4)
    assert torch.equal(found(features), module(features))


def spectral(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2, dtype=dtype), nn.BatchNorm1d(2))


@every_row(
    (Net, nn.Module.double),
    (lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2).double()), nn.Module.train),
    (partial(spectral, torch.complex64), nn.Module.train),
    (partial(spectral, torch.complex128), nn.Module.train),
)
def test_modules_of_any_dtypes_come_back_whole(tmp_path: Path, build: Any, change: Any) -> None:
    module = change(build())
    write(module, build, tmp_path)
    assert same_state(read_module(tmp_path, trust=True).module, module)


def test_complex_parameters_of_another_shape_are_refused(tmp_path: Path) -> None:
    write(spectral(torch.complex128), partial(spectral, torch.complex64), tmp_path)
    other = spectral(torch.complex128).state_dict() | {"1.bias": torch.zeros(3)}
    with (tmp_path / "module.safetensors").open("wb") as file:
        write_tensors(file, other)
    with pytest.raises(ConfigError, match="a different architecture"):
        read_module(tmp_path, trust=True)


METRICS = {"auroc": 0.5, "recall": [0.25, float("inf")], "by": {"a": 1.0}}
LABELS = (ColumnSpec("y", torch.float32, (3,)),)
PADDED = (
    ColumnSpec("tokens", torch.int64, (UNKNOWN,), padding=Padding(0, "attention_mask")),
    ColumnSpec("events", torch.float32, (UNKNOWN, 3), padding=Padding(-0.5)),
    ColumnSpec("age", torch.float32),
)

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NORMAL = Scale(torch.bfloat16, "0..1", MEAN, STD)
SCALED = (
    ColumnSpec("photo", torch.uint8, (3, 8, 9), FITS["pad"], scale=NORMAL),
    ColumnSpec("grey", torch.uint8, (1, 8, 9), PIXELS, scale=Scale(torch.float32, "0..255")),
    ColumnSpec("raw", torch.uint8, (4, 8, 9), FITS["stretch"]),
)

SAVED = {"dtype": "float32", "range": "0..1", "mean": list(MEAN), "std": list(STD)}


def saved(
    directory: Path, features: tuple[ColumnSpec, ...] = PADDED, loss: Any = None
) -> SavedModule:
    epoch = EpochSummary(epoch=1, loss=0.5, examples=3, rounds=1, seconds=0.5, metrics=METRICS)
    told: Any = {"labels": LABELS, "loss": loss}
    module = SavedModule(Net(), Net, features, "logits", {None: 3}, [epoch], **told)
    write_module(module, directory)
    return module


def read_changed(directory: Path, place: tuple[Any, ...], changes: Any) -> None:
    """Read what ``saved`` has written, with other values in a place of its description."""
    path = directory / "module.json"
    description = found = json.loads(path.read_text())
    for key in place:
        found = found[key]
    found |= changes
    path.write_text(json.dumps(description))
    read_module(directory, trust=["models"])


@every("features", [PADDED, SCALED])
def test_all_is_read_back_and_torch_s_losses_need_no_trust(
    tmp_path: Path, features: tuple[ColumnSpec, ...]
) -> None:
    wrote = saved(tmp_path, features, nn.CrossEntropyLoss(label_smoothing=0.25))
    found = read_module(tmp_path, trust=["models"])
    assert (found.features, found.labels) == (features, LABELS)
    assert found.history == wrote.history
    assert found.loss.label_smoothing == 0.25


def test_a_loss_of_one_s_own_needs_trust(tmp_path: Path) -> None:
    saved(tmp_path, loss=lambda outputs, targets: outputs - targets)
    with pytest.raises(ConfigError, match="loss was saved as a pickle"):
        read_module(tmp_path, trust=["models"])
    assert read_module(tmp_path, trust=True).loss(3, 1) == 2


@every_row(
    ({"labels": None}, "it has no list of labels"),
    ({"labels": [{"name": "y"}]}, "an entry of labels is invalid"),
    ({"labels": [{"name": "y", "dtype": "os", "row_shape": []}]}, "entry of labels is invalid"),
    ({"loss": {"recipe": {"import": "os:system"}}}, "not torch's own"),
    ({"loss": {"recipe": {"import": "torch.optim.sgd:SGD"}}}, "must be an nn.Module or"),
    ({"loss": []}, "which is not an object spec"),
)
def test_what_cannot_be_is_refused(tmp_path: Path, changes: Any, words: str) -> None:
    saved(tmp_path)
    with pytest.raises(ConfigError, match=words):
        read_changed(tmp_path, (), changes)


@every("value", [3, [1.0], {"a": "text"}, {"a": None}, {"a": [{"b": "c"}]}])
def test_metrics_that_are_no_numbers_are_refused(tmp_path: Path, value: Any) -> None:
    saved(tmp_path)
    with pytest.raises(ConfigError, match="an entry of history is invalid: metrics is"):
        read_changed(tmp_path, ("history", 0), {"metrics": value})


NO_PADDING: list[dict[str, Any]] = [
    *({"padding": {"value": value, "input": None}} for value in ("0", True, float("nan"))),
    *({"padding": {"value": 0, "input": name}} for name in ("mask", [])),
    *({"padding": padding} for padding in ({"value": 0}, 3)),
    *({"row_shape": shape} for shape in ([4], [4, -1], [-1, -1], [])),
]
NO_SCALE: list[dict[str, Any]] = [
    *({"scale": {**SAVED, "dtype": dtype}} for dtype in ("uint8", "Tensor", 3)),
    *({"scale": {**SAVED, "range": values}} for values in ("0-1", [])),
    *({"scale": {**SAVED, "mean": mean}} for mean in ([0.5], [], 0.5)),
    *({"scale": {**SAVED, "std": [1, 1, last]}} for last in (0, "1", float("nan"), 10**400)),
    *({"scale": scale} for scale in ({"dtype": "float32"}, {**SAVED, "more": 1}, 3)),
    *({"row_shape": [3]}, {"dtype": "float32"}, {"encoding": "image fitted"}),
]


@every(
    ("features", "changes"),
    [*((PADDED, each) for each in NO_PADDING), *((SCALED, each) for each in NO_SCALE)],
)
def test_columns_that_nobody_saves_are_refused(
    tmp_path: Path, features: tuple[ColumnSpec, ...], changes: dict[str, Any]
) -> None:
    saved(tmp_path, features)
    with pytest.raises(ConfigError, match="an entry of features is invalid"):
        read_changed(tmp_path, ("features", 0), changes)
