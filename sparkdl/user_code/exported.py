"""A program of ``torch.export`` as a module, so that it is sent, saved and called like any other.

Such a program is a graph with its values: it needs none of the code that the model was written in,
neither in the driver nor on the executors.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from sparkdl.errors import ModelError


class ExportedModule(nn.Module):
    """Predicts with a program, which cannot be trained.

    Args:
        program: its tensors have the rows as their first dimension, which has to be dynamic.

    Raises:
        ModelError: the program takes so many rows and no others.
    """

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__()
        _require_any_rows(program)
        self._program = program
        self._graph = program.module()
        self.training = False

    def forward(self, *features: Any, **named: Any) -> Any:
        """What the program returns for some rows."""
        return self._graph(*features, **named)

    def train(self, mode: bool = True) -> ExportedModule:
        """Stay in evaluation mode: a graph is of the mode in which it was exported.

        Raises:
            ModelError: it is to be trained.
        """
        if mode:
            raise ModelError(
                "a torch.export program cannot be trained: pass the module that it was exported "
                "from"
            )
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        file = io.BytesIO()
        torch.export.save(self._program, file)
        return _loaded, (file.getvalue(),)


def as_module(given: Any) -> nn.Module:
    """The module that a program is, or the module itself.

    Raises:
        ModelError: it is neither, or cannot be sent, or a program that takes only so many rows.
    """
    if isinstance(given, nn.Module):
        scripted = [n for n, m in given.named_modules() if isinstance(m, torch.jit.ScriptModule)]
        if scripted:
            raise ModelError(
                f"{f'the part {scripted[0]!r} of the model' if scripted[0] else 'the model'} is "
                "TorchScript, which torch does not pickle, so that it cannot be sent to the "
                "executors. Give the module that it was made from, or a program of torch.export"
            )
        return given
    if isinstance(given, ExportedProgram):
        return ExportedModule(given)
    raise ModelError(
        f"the model must be an nn.Module or a torch.export.ExportedProgram, not {given!r:.200}"
    )


def _loaded(saved: bytes) -> ExportedModule:
    return ExportedModule(torch.export.load(io.BytesIO(saved)))


def _require_any_rows(program: ExportedProgram) -> None:
    of_user = {
        each.arg.name
        for each in program.graph_signature.input_specs
        if each.kind == InputKind.USER_INPUT
    }
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op != "placeholder" or node.name not in of_user or not isinstance(value, Tensor):
            continue
        rows = value.shape[0] if value.dim() else None
        if not isinstance(rows, torch.SymInt):
            raise ModelError(
                f"the program was exported for a tensor '{node.name}' of shape "
                f"{tuple(value.shape)}, and takes no other number of rows. Export it with "
                "dynamic_shapes where dimension 0 of each tensor is torch.export.Dim('rows')"
            )
