"""A pickle's references are the modules that whoever loads and calls it will look for."""

from __future__ import annotations

import functools
import io
import math
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn

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
    assert {"json.decoder", "os", "os.path", "colorsys"} <= by_value
    assert __name__ not in by_value


def test_what_is_noted_does_not_change_the_pickle() -> None:
    value = Holder(a=nn.Linear(2, 2), b=lambda x: math.sqrt(x))
    assert pickled(value, set()) == cloudpickle.dumps(value)


def test_import_statements_of_every_form_are_seen(subtests: pytest.Subtests) -> None:
    for source, package, names in [
        ("import a.b, c as d", None, {"a.b", "c"}),
        ("from a import b as c, d", None, {"a", "a.b", "a.d"}),
        ("from a import *", None, {"a"}),
        ("from . import b\nfrom .c import d", "p.q", {"p.q", "p.q.b", "p.q.c", "p.q.c.d"}),
        ("from .. import b", "p.q", {"p", "p.b"}),
        ("from ... import b", "p.q", set()),
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
    assert set(imported_names(code, None)) == {"a_late", "a_late.one", "a_late.two"}
