"""A user's code: the modules that it needs, and tracebacks that begin with it."""

from __future__ import annotations

import functools
import io
import math
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from every_row import every, every_row
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from sparkdl.errors import ModelError
from sparkdl.protocols import Batch
from sparkdl.replica import Replica
from sparkdl.user_code.exported import ExportedModule, as_module
from sparkdl.user_code.needed_modules import ReferencePickler, imported_names, takes_along
from sparkdl.user_code.tracebacks import message_of, shortened, text_of, traceback_of


class Explodes(nn.Linear):
    def forward(self, features: Tensor) -> Tensor:
        return self.deeper(features)

    def deeper(self, features: Tensor) -> Tensor:
        raise ZeroDivisionError("the reactor is empty")


def raised(call: Callable[[], Any]) -> Exception:
    """With the frames from where a worker's own code would catch it."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any
        call()
    calls = caught.value.__traceback__
    assert calls is not None
    assert calls.tb_next is not None
    return caught.value.with_traceback(calls.tb_next.tb_next)


def step_of(module: nn.Module, width: int = 4) -> Callable[[], Any]:
    replica = Replica(module, torch.optim.SGD, nn.CrossEntropyLoss())  # type: ignore[arg-type]
    batch = Batch((torch.zeros(2, width),), torch.tensor([0, 1]), last=False)
    return lambda: replica.step(batch)


def test_it_begins_with_the_users_code_and_says_what_came_before() -> None:
    lines = traceback_of(raised(step_of(Explodes(4, 3)))).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "test_user_code.py" in lines[1]
    assert lines[1].endswith("in forward")
    assert "ZeroDivisionError: the reactor is empty" in lines
    assert lines[-1].startswith("(Before this come ")
    assert "the first in replica/replica.py, line " in lines[-1]
    assert not any("replica.py" in line for line in lines[:-1])


def test_without_code_of_the_user_it_begins_where_ours_ends() -> None:
    lines = traceback_of(raised(step_of(nn.Linear(5, 3)))).splitlines()
    assert "torch/nn/modules" in lines[1]
    assert "replica/replica.py" in lines[-1]


def test_an_error_of_ours_alone_is_told_whole() -> None:
    def build() -> Replica:
        return Replica(nn.Identity(), torch.optim.SGD, nn.MSELoss())  # type: ignore[arg-type]

    text = traceback_of(raised(build))
    assert "replica.py" in text
    assert "Before this" not in text


def test_what_caused_an_error_is_told_as_well() -> None:
    class Explains(Explodes):
        def forward(self, features: Tensor) -> Tensor:
            try:
                return self.deeper(features)
            except ZeroDivisionError as error:
                raise ValueError("no power") from error

    text = traceback_of(raised(step_of(Explains(4, 3))))
    assert text.index("the reactor is empty") < text.index("ValueError: no power")


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("y")])
def test_an_error_that_was_never_raised_is_its_name(error: Exception) -> None:
    assert traceback_of(error) == "".join(f"{type(error).__name__}: {error}")


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class NoText(Exception):
    def __str__(self) -> str:
        return 5  # type: ignore[return-value]


class NoNotes(Exception):
    @property
    def __notes__(self) -> list[str]:
        raise ValueError("no notes")


class NoException(BaseException):
    pass


def group_of(depth: int) -> BaseException:
    error: Exception = ValueError("innermost")
    for level in range(depth):
        error = ExceptionGroup(f"level {level}", [error, *map(ValueError, range(1_000))])  # noqa: F821 # Python 3.11
    return error


def chain_of(length: int) -> BaseException:
    error = ValueError("first")
    for number in range(length):
        following = ValueError(f"number {number}")
        following.__cause__, error = error, following
    return error


def with_notes(note: str, count: int) -> BaseException:
    error = ValueError("noted")
    for _ in range(count):
        error.add_note(note)
    return error


HOSTILE = {
    "Silent: <exception str() failed>": Silent(),
    "NoText: <exception str() failed>": NoText(),
    "NoNotes: it has text": NoNotes("it has text"),
    "NoException: base": NoException("base"),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "SystemExit: 3": SystemExit(3),
    "GeneratorExit": GeneratorExit(),
    "ValueError: xx": ValueError("x" * 50_000_000),
    "ValueError: half \\ud800": ValueError("half \ud800 a pair"),
    "ValueError: noted": with_notes("n" * 1_000_000, 10),
    "ValueError: number 9999": chain_of(10_000),
    "ExceptionGroup: level 19": group_of(20),
}


@every("begins", HOSTILE)
def test_whatever_is_raised_is_named_and_cut_to_size(begins: str) -> None:
    try:
        raise HOSTILE[begins]
    except BaseException as error:
        name, told, text = message_of(error), traceback_of(error), text_of(error)
    assert begins in name
    assert begins.partition(":")[0] in told
    assert "test_user_code.py" in told
    assert max(map(len, (name, told, text))) < 21_000
    for each in (name, told, text):
        each.encode()


def test_what_is_cut_keeps_its_beginning_and_its_end() -> None:
    text = shortened("a" * 1_000 + "b" * 1_000_000 + "c" * 1_000, 900)
    assert text.startswith("a" * 600)
    assert text.endswith("c" * 300)
    assert "[1001100 characters left out]" in text
    assert shortened("short", 900) == "short"


def test_a_short_error_is_told_as_python_tells_it() -> None:
    for error in (ValueError("no"), KeyError("x"), ValueError(), with_notes("see there", 1)):
        expected = "".join(traceback.format_exception_only(error)).strip()
        assert message_of(error) == expected


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


def test_looking_for_a_parameter_copies_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, net = nn.Linear(2, 2), nn.Linear(2, 2)
    for storage in (torch.TypedStorage, torch.UntypedStorage):
        monkeypatch.setattr(storage, "__reduce__", lambda self: pytest.fail("values are copied"))
    assert not takes_along(Holder(a=teacher), net.parameters())
    assert takes_along(Holder(a=teacher, b=net), net.parameters())


def test_what_is_noted_does_not_change_the_pickle() -> None:
    value = Holder(a=nn.Linear(2, 2), b=lambda x: math.sqrt(x))
    assert pickled(value, set()) == cloudpickle.dumps(value)


@every_row(
    ("import a.b, c as d", None, {"a.b", "c"}),
    ("from a import b as c, d", None, {"a"}),
    ("from a import *", None, {"a"}),
    ("from . import b\nfrom ..c import d", "p.q", {"p.q"}),
    ("from . import b", None, set()),
    ("class A:\n  def f(self):\n    return lambda: __import__('x')", None, set()),
    ("if 0.5:\n  try:\n    import a\n  except ImportError:\n    import b", None, {"a", "b"}),
)
def test_import_statements_of_every_form_are_seen(
    source: str, package: str | None, names: set[str]
) -> None:
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


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_torchscript_is_refused_which_torch_does_not_pickle() -> None:
    scripted = torch.jit.script(nn.Linear(3, 2))
    for given, who in ((scripted, "the model is"), (nn.Sequential(scripted), "the part '0' of")):
        with pytest.raises(ModelError, match=f"^{who}.* TorchScript.*torch.export"):
            as_module(given)


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
