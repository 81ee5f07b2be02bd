"""Modules that a user's code needs."""

from __future__ import annotations

import functools
import io
import math
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from sparkdl.errors import ModelError
from sparkdl.user_code.exported import ExportedModule, as_module
from sparkdl.user_code.needed_modules import ReferencePickler, imported_names


def pickled(value: Any, names: set[str]) -> bytes:
    file = io.BytesIO()
    ReferencePickler(file, names).dump(value)
    return file.getvalue()


def names_of(value: Any) -> set[str]:
    names: set[str] = set()
    pickled(value, names)
    return names


class Sentinel:
    def __reduce__(self) -> str:
        return "SENTINEL"


SENTINEL = Sentinel()


class Holder:
    def __init__(self, **values: Any) -> None:
        self.values = values


def imports_things() -> None:
    import json.decoder
    from os import path

    def deeper() -> Any:
        import colorsys as c

        return c

    print(json, path, deeper)


def test_classes_functions_and_modules_are_named_by_their_module_wherever_they_are() -> None:
    here = __name__
    assert {here, "torch.nn.modules.linear"} <= names_of(Holder(a=[nn.Linear(2, 2)]))
    assert here in names_of({"x": (1, functools.partial(imports_things))})
    assert "math" in names_of([math.sqrt])
    assert here in names_of([SENTINEL])
    assert "numpy" in names_of(Holder(module=np))
    assert "torch.nn.functional" in names_of(torch.nn.functional.softmax)
    assert names_of([1, "text", None, {"a": 2.0}]) == set()


def test_a_function_by_value_also_needs_what_it_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    by_name = names_of(imports_things)
    assert by_name == {__name__}
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        by_value = names_of(imports_things)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert {"json.decoder", "os", "colorsys"} <= by_value
    assert __name__ not in by_value


def test_what_is_noted_does_not_change_the_pickle() -> None:
    value = Holder(a=nn.Linear(2, 2), b=lambda x: math.sqrt(x))
    assert pickled(value, set()) == cloudpickle.dumps(value)


def test_import_statements_of_every_form_are_seen(subtests: pytest.Subtests) -> None:
    for source, package, names in [
        ("import a.b, c as d", None, {"a.b", "c"}),
        ("from a import b as c, d", None, {"a"}),
        ("from a import *", None, {"a"}),
        ("from . import b\nfrom ..c import d", "p.q", {"p.q"}),
        ("from . import b", None, set()),
        ("class A:\n  def f(self):\n    return lambda: __import__('x')", None, set()),
        ("if 0.5:\n  try:\n    import a\n  except ImportError:\n    import b", None, {"a", "b"}),
    ]:
        with subtests.test(source=source, package=package, names=names):
            code = compile(source, "a_file", "exec")
            assert set(imported_names(code, package)) == names


def test_imports_behind_more_than_256_constants_are_seen(tmp_path: Path) -> None:
    source = "\n".join([*(f"x{n} = {n}.5" for n in range(400)), "from a_late import one, two"])
    code = compile(source, "a_file", "exec")
    assert set(imported_names(code)) == {"a_late"}


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
