"""A trained module as files: weights as safetensors, the rest as JSON; readable without Spark.

module.json           how to build the module, what its inputs and outputs are, its history
module.safetensors    parameters and buffers
buffers.safetensors   buffers that are no part of the module's state, if there are any
model.pkl             only if the architecture could not be described; see ``object_spec``
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from sparkdl.arguments import as_number, require_seed
from sparkdl.checkpoint.object_spec import LOSS, MODEL, load_object, save_object
from sparkdl.checkpoint.portable import built, other_buffers, put_state
from sparkdl.checkpoint.tensor_file import read_tensors, write_tensors
from sparkdl.checkpoint.trust import TrustArgument
from sparkdl.durable.local_files import whole_directory
from sparkdl.encodings import named
from sparkdl.encodings.scale import LARGEST, Scale
from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.events import EpochSummary
from sparkdl.outputs import OutputKey, Widths, names_output
from sparkdl.protocols import UNKNOWN, ColumnSpec, Padding, SequenceInput
from sparkdl.untrusted import read
from sparkdl.user_code.tracebacks import message_of, text_of

DESCRIPTION = "module.json"
WEIGHTS = "module.safetensors"
OTHER_BUFFERS = "buffers.safetensors"
FORMAT = 4
"""Version of the files' format; a reader refuses any other."""
MAX_JSON_BYTES = 64 << 20
"""Largest file; a thousand columns and ten thousand epochs take 3 MB."""


@dataclass(frozen=True)
class SavedModule:
    """Everything that a ``TorchModel`` is made of.

    Attributes:
        module: the trained module.
        builder: what the user gave as ``model``: a module, or a function that builds one.
        seed: of the random numbers that it drew when it built the module; None if unknown.
        features: the tensors that the module takes.
        head: what its outputs mean, by name.
        widths: its outputs' widths.
        history: one summary per epoch.
        labels: the tensors that the outputs are compared with, as far as they are known.
        loss: the loss that compares them, if it was saved.
    """

    module: nn.Module
    builder: Any
    features: Sequence[ColumnSpec]
    head: str
    widths: Widths
    history: Sequence[EpochSummary]
    labels: Sequence[ColumnSpec] = ()
    loss: Any = None
    seed: int | None = None


def write_module(saved: SavedModule, directory: Path) -> None:
    """Write the files into an existing directory.

    Raises:
        ConfigError: the module's state has something else than tensors.
    """
    state = saved.module.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"the model cannot be saved: '{name}' in its state is a {type(value).__name__}, "
                "but the file of its weights holds only tensors. Return a tensor from "
                "get_extra_state; or save model.module with torch.save"
            )
    _write(state, directory / WEIGHTS)
    if others := other_buffers(saved.module):
        _write(others, directory / OTHER_BUFFERS)
    description = {
        "format": FORMAT,
        "model": save_object(saved.builder, directory, "model"),
        "seed": saved.seed,
        "features": list(map(_column_fields, saved.features)),
        "labels": list(map(_column_fields, saved.labels)),
        "loss": None if saved.loss is None else save_object(saved.loss, directory, "loss"),
        "head": saved.head,
        "outputs": [{"key": key, "width": width} for key, width in saved.widths.items()],
        "history": [dataclasses.asdict(epoch) for epoch in saved.history],
    }
    (directory / DESCRIPTION).write_text(json.dumps(description, indent=2))


def read_module(directory: Path, *, trust: TrustArgument) -> SavedModule:
    """Read the files back.

    Args:
        directory: where ``write_module`` wrote.
        trust: what may run besides torch's own classes: code of the named modules, or with True any
            code, including a pickled architecture.

    Raises:
        ConfigError: there is no saved module, it is damaged, its format is newer, or its
            architecture is not trusted or cannot be imported.
    """
    path = directory / DESCRIPTION
    if not path.is_file():
        raise ConfigError(f"there is no saved model in {directory}: {DESCRIPTION} is missing")
    description = _read_description(path)
    features = _entries(path, description, "features", _column)
    labels = _entries(path, description, "labels", _column)
    history = _entries(path, description, "history", lambda **each: read(EpochSummary, each))
    widths = dict(_entries(path, description, "outputs", _output))
    builder = load_object(description.get("model"), directory, "model", expected=MODEL, trust=trust)
    spec, loss = description.get("loss"), None
    if spec is not None:
        loss = load_object(spec, directory, "loss", expected=LOSS, trust=trust)
    seed = description.get("seed")
    if seed is not None:
        seed = require_seed(f"seed in {path}", seed)
    module = _build_module(builder, seed)
    _put_weights(module, directory)
    return SavedModule(
        module=module.eval(),
        builder=builder,
        features=tuple(features),
        head=description["head"],
        widths=widths,
        history=history,
        labels=tuple(labels),
        loss=loss,
        seed=seed,
    )


def _build_module(builder: Any, seed: int | None) -> nn.Module:
    try:
        module = built(builder, seed)
    except Exception as error:  # a constructor may raise anything
        raise ConfigError(f"model cannot be built as it was saved: {message_of(error)}") from error
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"model was saved as something that builds {type(module)}, not an nn.Module"
        )
    return module


def _put_weights(module: nn.Module, directory: Path) -> None:
    path, others = directory / WEIGHTS, directory / OTHER_BUFFERS
    if not path.is_file():
        raise ConfigError(f"the weights in {path} are missing, or it is not a plain file")
    state = _read(path)
    cached = _read(others) if others.is_file() else {}
    try:
        put_state(module, state)
        present = other_buffers(module)
        for name, values in cached.items():
            # What the module would only make later, it makes again.
            if name in present and values.shape == present[name].shape:
                present[name].data = values
    except Exception as error:  # modules may load their state in their own ways
        raise ConfigError(
            f"the weights in {path} belong to a different architecture from the one the model "
            f"builds now: {text_of(error)}"
        ) from error


def _write(tensors: Mapping[str, Tensor], path: Path) -> None:
    with path.open("wb") as file:
        write_tensors(file, tensors)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        with path.open("rb") as file:
            return read_tensors(file)[0]
    except (CheckpointError, OSError) as error:
        raise ConfigError(f"the weights in {path} are damaged: {error}") from error


def _read_description(path: Path) -> dict[str, Any]:
    description = read_json_object(path)
    written = description.get("format")
    if type(written) is int and written > FORMAT:
        raise ConfigError(
            f"the model in {path.parent} has format {written}, newer than the {FORMAT} that this "
            "version of sparkdl-torch reads. Upgrade it"
        )
    if type(written) is int and 1 <= written < FORMAT:
        raise ConfigError(
            f"the model in {path.parent} has format {written}, from before the first release: only "
            f"format {FORMAT} is read. Train it again"
        )
    if written != FORMAT or not isinstance(description.get("head"), str):
        raise ConfigError(f"{path} is damaged or not a saved model")
    return description


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        ConfigError: it is missing, not a regular file, too large, or does not hold such an object.
    """
    try:
        if not path.is_file():
            raise ConfigError(f"{path} is missing, or not a plain file")
        with path.open("rb") as file:
            octets = file.read(MAX_JSON_BYTES + 1)
        if len(octets) > MAX_JSON_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_JSON_BYTES >> 20} MiB: it is damaged")
        value = json.loads(octets)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is damaged: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is damaged: it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is damaged: it holds no JSON object")
    return value


def _entries(path: Path, description: dict[str, Any], name: str, read: Any) -> list[Any]:
    entries = description.get(name)
    if not isinstance(entries, list):
        raise ConfigError(f"{path} is damaged: it has no list of {name}")
    try:
        return [read(**entry) for entry in entries]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path} is damaged: an entry of {name} is invalid: {error}") from error


def _column_fields(column: ColumnSpec) -> dict[str, Any]:
    fields = {
        "name": column.name,
        "dtype": str(column.dtype).removeprefix("torch."),
        "row_shape": list(column.row_shape),
        "encoding": column.encoding.name,
        "padding": None if column.padding is None else dataclasses.asdict(column.padding),
    }
    if column.scale is not None:
        dtype = str(column.scale.dtype).removeprefix("torch.")
        fields["scale"] = {**dataclasses.asdict(column.scale), "dtype": dtype}
    return fields


def _column(
    name: str,
    dtype: str,
    row_shape: list[int],
    encoding: str,
    padding: dict[str, Any] | None,
    scale: dict[str, Any] | None = None,
) -> ColumnSpec:
    element = _dtype(dtype)
    if not isinstance(name, str) or element is None:
        raise ValueError(f"{name!r} cannot be of type {dtype!r}")
    if not all(_is_count(n) or n == UNKNOWN for n in row_shape):
        raise ValueError(f"{name!r} cannot have shape {row_shape!r}")
    spec = ColumnSpec(name, element, tuple(row_shape), named(encoding))
    if scale is not None:
        return dataclasses.replace(spec, scale=_scale(spec, **scale))
    if padding is None:
        return spec
    if row_shape.count(UNKNOWN) != 1 or row_shape[0] != UNKNOWN:
        raise ValueError(f"{name!r} of shape {row_shape!r} has no length to pad")
    return dataclasses.replace(spec, padding=_padding(**padding))


def _dtype(name: Any) -> torch.dtype | None:
    # Not by getattr, by which torch would import some of its modules.
    found = vars(torch).get(name) if isinstance(name, str) else None
    return found if isinstance(found, torch.dtype) else None


def _scale(spec: ColumnSpec, dtype: Any, range: Any, mean: Any, std: Any) -> Scale:
    element, shape = _dtype(dtype), spec.row_shape
    pixels = spec.dtype is torch.uint8 and len(shape) == 3
    numbers = all(
        isinstance(each, list) and None not in map(as_number, each) for each in (mean, std)
    )
    sound = pixels and numbers and range in LARGEST and 0 not in std
    if not sound or {len(mean), len(std)} not in ({0}, {shape[0]}):
        raise ValueError(f"{spec.name!r} cannot become floats by {range!r}, {mean!r}, {std!r}")
    if element is None or not element.is_floating_point:
        raise ValueError(f"{spec.name!r} cannot become floats of type {dtype!r}")
    return Scale(element, range, tuple(map(float, mean)), tuple(map(float, std)))


def _padding(value: float, input: SequenceInput | None) -> Padding:
    number = type(value) in (int, float) and math.isfinite(value)
    if not number or input not in (None, *get_args(SequenceInput)):
        raise ValueError(f"rows cannot be padded with {value!r}, {input!r}")
    return Padding(value, input)


def _output(key: Any, width: Any) -> tuple[OutputKey | None, int | None]:
    if key is not None and not names_output(key):
        raise ValueError(f"{key!r} does not name an output")
    if not (width is None or _is_count(width)):
        raise ValueError(f"output {key!r} cannot have width {width!r}")
    return key, width


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def load_module(path: str | Path, *, trust: TrustArgument = False) -> nn.Module:
    """Load the plain nn.Module of a saved ``TorchModel`` from a local directory, without Spark.

    Args:
        path: where the model was saved.
        trust: names of the modules that define the model's own classes and functions, for example
            ``["mypackage.models"]``; torch's need no trust. True trusts everything, even a pickled
            architecture, which runs its author's code.

    Raises:
        ConfigError: there is no saved model, it is damaged, of a newer format, or of an
            architecture that is not trusted or cannot be imported.
    """
    return read_module(whole_directory(Path(path)), trust=trust).module
