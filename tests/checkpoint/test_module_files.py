"""A module's files: weights as safetensors, the rest as JSON; no Spark anywhere."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from every_row import every
from models import Net
from safetensors.torch import load_file
from torch import nn

from sparkdl import EpochSummary, load_module
from sparkdl.checkpoint.module_files import SavedModule, read_module, write_module
from sparkdl.checkpoint.tensor_file import write_tensors
from sparkdl.errors import ConfigError, SparkDLError
from sparkdl.protocols import ColumnSpec

HISTORY = [
    EpochSummary(epoch=1, loss=0.5, examples=10, rounds=3, seconds=0.25),
    EpochSummary(
        epoch=2,
        loss=float("inf"),
        examples=10,
        rounds=3,
        seconds=0.5,
        mean_staleness=1.5,
        max_staleness=4,
    ),
]
FEATURES = (ColumnSpec("features", torch.float32, (4,)), ColumnSpec("carrier", torch.int64))


def write(module: nn.Module, builder: Any, directory: Path) -> None:
    write_module(SavedModule(module, builder, FEATURES, "logits", {None: 3}, HISTORY), directory)


def same_state(first: nn.Module, second: nn.Module) -> bool:
    mine, other = first.state_dict(), second.state_dict()
    return mine.keys() == other.keys() and all(
        mine[k].dtype == other[k].dtype and torch.equal(mine[k], other[k]) for k in mine
    )


def test_everything_comes_back(tmp_path: Path) -> None:
    module = Net()
    write(module, Net, tmp_path)
    loaded = read_module(tmp_path, trust=["models"])
    assert same_state(loaded.module, module)
    assert loaded.builder is Net
    assert loaded.features == FEATURES
    assert (loaded.head, loaded.widths) == ("logits", {None: 3})
    assert list(loaded.history) == HISTORY
    assert not loaded.module.training


def test_weights_are_plain_safetensors_under_torchs_names(tmp_path: Path) -> None:
    module = Net()
    write(module, Net, tmp_path)
    weights = load_file(tmp_path / "module.safetensors")
    assert weights.keys() == module.state_dict().keys()


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


def test_several_outputs_come_back_by_name_and_position(tmp_path: Path) -> None:
    widths = {None: 3, "logits": 3, 0: None}
    write_module(SavedModule(Net(), Net, FEATURES, "unknown", widths, HISTORY), tmp_path)
    assert read_module(tmp_path, trust=["models"]).widths == widths


@every("key", [-1, True, 1.0, ["logits"]])
def test_a_key_that_names_no_output_is_refused(tmp_path: Path, key: Any) -> None:
    write(Net(), Net, tmp_path)
    path = tmp_path / "module.json"
    outputs = [{"key": key, "width": 3}]
    path.write_text(json.dumps({**json.loads(path.read_text()), "outputs": outputs}))
    with pytest.raises(ConfigError, match="an entry of outputs is invalid"):
        read_module(tmp_path, trust=["models"])


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no saved model in .*module\.json is missing"):
        load_module(tmp_path)


def test_another_format_is_refused_with_both_numbers(tmp_path: Path) -> None:
    write(Net(), Net, tmp_path)
    path = tmp_path / "module.json"
    for number, words in {
        99: "format 99, newer than the 4",
        3: "format 3, .* only format 4",
    }.items():
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


@every(
    ("build", "change"),
    [
        (Net, nn.Module.double),
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2).double()), nn.Module.train),
        (partial(spectral, torch.complex64), nn.Module.train),
        (partial(spectral, torch.complex128), nn.Module.train),
    ],
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
