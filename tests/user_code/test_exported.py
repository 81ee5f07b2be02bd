"""A program of torch.export is a module that can be sent."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from sparkdl.errors import ModelError
from sparkdl.user_code.exported import ExportedModule, as_module


class Scaled(nn.Module):
    """Named arguments, a buffer, and a mode that matters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(3, 2), nn.Dropout()
        self.register_buffer("scale", torch.tensor([2.0, 3.0]))

    def forward(self, x: Tensor, weight: Tensor) -> dict[str, Tensor]:
        return {"out": self.dropout(self.layer(x)) * self.scale * weight}


def exported(shapes: Mapping[str, Any] | None, module: nn.Module | None = None) -> ExportedProgram:
    example = (torch.randn(2, 3), torch.ones(2, 1))
    return torch.export.export((module or Scaled()).eval(), example, dynamic_shapes=shapes)


def rows() -> dict[str, dict[int, Any]]:
    count = Dim("rows")
    return {"x": {0: count}, "weight": {0: count}}


def test_it_gives_what_the_module_gave_also_when_it_was_sent() -> None:
    scaled = Scaled()
    module = pickle.loads(pickle.dumps(ExportedModule(exported(rows(), scaled))))
    x, weight = torch.randn(5, 3), torch.rand(5, 1)
    expected = scaled(x, weight)["out"]
    assert torch.equal(module(x, weight)["out"], expected)
    assert torch.equal(module.eval()(x, weight)["out"], expected)
    assert not module.training


def test_one_of_a_fixed_number_of_rows_is_refused_with_its_shape() -> None:
    with pytest.raises(ModelError, match=r"tensor 'x' of shape \(2, 3\).*Dim\('rows'\)"):
        ExportedModule(exported(None))


def test_nothing_but_modules_and_programs_is_taken() -> None:
    with pytest.raises(ModelError, match=r"not 'model\.pt2'"):
        as_module("model.pt2")
    module = nn.Linear(1, 1)
    assert as_module(module) is module


def test_it_cannot_be_trained() -> None:
    with pytest.raises(ModelError, match="cannot be trained"):
        ExportedModule(exported(rows())).train()
