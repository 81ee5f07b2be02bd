"""A trained module as files: weights as safetensors, the rest as JSON; readable without Spark.

module.json           how to build the module, what its inputs and outputs are, its history
module.safetensors    parameters and buffers
model.pkl             only if the architecture could not be described; see ``recipe``
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from sparkdl.checkpoint.recipe import load_recipe, save_recipe
from sparkdl.errors import ConfigError
from sparkdl.events import EpochSummary
from sparkdl.protocols import ColumnSpec
from sparkdl.randomness import borrowed_random_numbers

DESCRIPTION = "module.json"
WEIGHTS = "module.safetensors"
FORMAT = 1
"""Version of the files' format; a reader refuses a newer one."""


@dataclass(frozen=True)
class SavedModule:
    """Everything that a ``TorchModel`` is made of.

    Attributes:
        module: the trained module.
        builder: what the user gave as ``model``: a module, or a function that builds one.
        features: the tensors that the module takes.
        head: name of the meaning of its outputs.
        output_width: numbers a row that it gives; None for one without a dimension of its own.
        history: one summary an epoch.
    """

    module: nn.Module
    builder: Any
    features: Sequence[ColumnSpec]
    head: str
    output_width: int | None
    history: Sequence[EpochSummary]


def write_module(saved: SavedModule, directory: Path) -> None:
    """Write the files into an existing directory."""
    # Tied parameters share memory, which safetensors refuses; each name gets a copy of its own.
    state = {
        name: tensor.detach().clone().contiguous()
        for name, tensor in saved.module.state_dict().items()
    }
    save_file(state, directory / WEIGHTS)
    description = {
        "format": FORMAT,
        "model": save_recipe(saved.builder, directory, "model"),
        "features": [
            {
                "name": f.name,
                "dtype": str(f.dtype).removeprefix("torch."),
                "row_shape": list(f.row_shape),
                "encoding": f.encoding,
            }
            for f in saved.features
        ],
        "head": saved.head,
        "output_width": saved.output_width,
        "history": [dataclasses.asdict(epoch) for epoch in saved.history],
    }
    (directory / DESCRIPTION).write_text(json.dumps(description, indent=2))


def read_module(directory: Path, *, trust: bool) -> SavedModule:
    """Read the files back.

    Args:
        directory: where ``write_module`` wrote.
        trust: whether a pickled architecture may be loaded.

    Raises:
        ConfigError: there is no saved module, its format is newer, or its architecture cannot be
            imported or is an untrusted pickle.
    """
    path = directory / DESCRIPTION
    if not path.is_file():
        raise ConfigError(f"there is no saved model in {directory}: {DESCRIPTION} is missing")
    description = _read_description(path)
    builder = load_recipe(description["model"], directory, "model", trust=trust)
    with borrowed_random_numbers():
        module: nn.Module = builder if isinstance(builder, nn.Module) else builder()
    state = _read_weights(directory / WEIGHTS)
    dtypes = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
    if len(dtypes) == 1:
        module = module.to(dtypes.pop())
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise ConfigError(
            f"the weights in {directory / WEIGHTS} are those of another architecture than the "
            f"model builds now: {error}"
        ) from error
    return SavedModule(
        module=module.eval(),
        builder=builder,
        features=tuple(
            ColumnSpec(
                f["name"],
                getattr(torch, f["dtype"]),
                tuple(f["row_shape"]),
                f.get("encoding", "numbers"),  # models were saved before there were others
            )
            for f in description["features"]
        ),
        head=description["head"],
        output_width=description["output_width"],
        history=[EpochSummary(**epoch) for epoch in description["history"]],
    )


def _read_description(path: Path) -> dict[str, Any]:
    try:
        description: dict[str, Any] = json.loads(path.read_text())
        newest = description["format"]
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{path} is damaged or no saved model: {error!r}") from error
    if newest > FORMAT:
        raise ConfigError(
            f"the model in {path.parent} has format {newest}, newer than the {FORMAT} that this "
            "version of sparkdl-torch reads. Upgrade it"
        )
    return description


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"the weights in {path} are missing or damaged: {error}") from error


def load_module(path: str | Path, *, trust: bool = False) -> nn.Module:
    """Load the plain nn.Module of a saved ``TorchModel`` from a local directory, without Spark.

    Args:
        path: where the model was saved.
        trust: whether a pickled architecture may be loaded; a pickle runs its author's code.

    Raises:
        ConfigError: as ``read_module``.
    """
    return read_module(Path(path), trust=trust).module
