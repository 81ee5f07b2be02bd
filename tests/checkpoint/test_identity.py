"""What a checkpoint is of: objects and settings are told the same way in every process."""

from __future__ import annotations

import functools
import json
import logging
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from every_row import every, every_row
from torch import nn

from sparkdl.checkpoint.identity import describe, describe_model, describe_optimizer
from sparkdl.checkpoint.policy import differences, require_same
from sparkdl.errors import CheckpointError, ConfigError

SCRIPT = '''
import dataclasses, enum, functools, json, logging, sys, threading
import numpy as np, torch
from torch import nn
from sparkdl.checkpoint.identity import describe, describe_model, describe_optimizer

ALPHA = 0.25
WEIGHTS = torch.tensor([1.0, 2.0])
LOOKUP = {"b": 1, "a": {"z", "y", "x", "w"}}
logger = logging.getLogger("mine")

class Mode(enum.Enum):
    FIRST, SECOND = 1, 2

@dataclasses.dataclass
class Settings:
    rate: float = 0.5
    names: frozenset = frozenset({"p", "q", "r", "s"})
    mode: Mode = Mode.SECOND

class Transform:
    __slots__ = ("size", "lock")
    def __init__(self, size):
        self.size, self.lock = size, threading.Lock()
    def __call__(self, batch):
        return batch

def helper(x):
    return x if x in {"one", "two", "three"} else ALPHA

def loss(outputs, targets, *, scale=2.0, table=LOOKUP):
    """Doc."""
    logger.debug("called")
    settings = [name for name in Settings().names if name in {"p", "q"}]
    return helper(outputs) * np.float64(scale) * len(settings) * WEIGHTS.sum()

def closed(k):
    seen = {k: object()}
    return lambda outputs, targets: helper(outputs) + k + len(seen)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.settings = nn.Sequential(nn.Linear(3, 4), nn.ReLU()), Settings()
        self.register_forward_hook(lambda module, inputs, output: output)
    def forward(self, x):
        return helper(self.body(x))

class Mine(torch.optim.SGD):
    def __init__(self, parameters, decay):
        super().__init__(parameters, lr=0.1)
        self.decay, self.first = decay, self.param_groups[0]["params"][0]

torch.manual_seed(3)
net = Net()
net.register_forward_hook(loss)
told = {
    "function": describe(loss),
    "partial": describe(functools.partial(loss, scale=3.0)),
    "closure": describe(closed(4)),
    "object": describe(Transform(8)),
    "bound": describe(Transform(8).__call__),
    "dataclass": describe(Settings()),
    "class": describe(Net),
    "lambda": describe(lambda x: x.mean()),
    "torch": describe(nn.CrossEntropyLoss(weight=WEIGHTS)),
    "builtin": describe(torch.tanh),
    "library": describe(nn.functional.cross_entropy),
    "model": describe_model(net),
    "optimizer": describe_optimizer(Mine(net.parameters(), 0.9)),
    "nothing": describe(None),
}
print(json.dumps(told))
'''


@pytest.mark.nightly
def test_a_script_tells_the_same_in_another_process_and_from_another_place(tmp_path: Path) -> None:
    processes = []
    for seed, source in (("1", SCRIPT), ("2", f"# A line more\n\n{SCRIPT}")):
        script = tmp_path / seed / f"script{seed}.py"
        script.parent.mkdir()
        script.write_text(source)
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        command = [sys.executable, str(script)]
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        )
    first, second = (json.loads(process.communicate(timeout=120)[0]) for process in processes)
    assert "0x" not in json.dumps(first)
    # What people read may have a set in it.
    assert {name: each["parts"] for name, each in first.items()} == {
        name: each["parts"] for name, each in second.items()
    }
    assert list(differences(first, second)) == []


def other(changed: Callable[[Any], None]) -> None:
    """To be found by its code alone."""


def same(first: object, second: object) -> bool:
    return not list(differences({"it": describe(first)}, {"it": describe(second)}))


def line(first: object, second: object) -> str:
    """The one line in which two objects differ."""
    (found,) = differences({"it": describe(first)}, {"it": describe(second)})
    return found


def cell(source: str, **given: Any) -> Any:
    """What a notebook's cell defines as ``it``, run again."""
    variables: dict[str, Any] = {"__name__": "__main__", "torch": torch, "nn": nn, **given}
    exec(compile(source, "<cell>", "exec"), variables)
    return variables["it"]


def test_a_cell_that_is_run_again_defines_the_same() -> None:
    for source in (
        "it = lambda o, t: (o - t).square().mean()",
        "class it(nn.Module):\n  def forward(self, x):\n    return super().forward(x)",
        "a = 3\ndef helper(x):\n  return x + a\ndef it(o, t):\n  return helper(o)",
    ):
        assert same(cell(source), cell("\n\n" + source))
        assert same(cell(source), cloudpickle.loads(cloudpickle.dumps(cell(source))))


@every_row(
    ("it = lambda o: o + $", "its code"),
    ("it = lambda o: o.f$()", "its code"),
    ("def it(o, k=$): return k", "default of k"),
    ("def it(o, *, k=$): return k", "default of k"),
    ("a = $\ndef it(o): return a", "variable a"),
    ("a = torch.full((2,), $)\ndef it(o): return a", "variable a"),
    ("def h(o): return $\ndef it(o): return h(o)", "variable h"),
    ("def f(k):\n  return lambda o: k\nit = f({1: [$]})", "variable k"),
    ("def it(o):\n  def inner(x):\n    return x + $\n  return inner(o)", "its code"),
    ("class it(nn.Module):\n  def forward(self, x):\n    return x * $", "its forward"),
    ("class it:\n  k = $", "its k"),
    ("class B:\n  def f(self): return $\nclass it(B): pass", "its bases"),
    (
        "class C:\n  def __init__(self, k): self.k = k\n  def __repr__(self): return 'C'\n"
        "it = C($)",
        "attribute k",
    ),
    ("class it:\n  @property\n  def f(self): return $", "its f"),
)
def test_what_does_something_else_is_told_by_the_part(source: str, part: str) -> None:
    found = line(*(cell(source.replace("$", number)) for number in "12"))
    assert "differs in its" in found
    assert part in found


def test_objects_whose_text_tells_them_apart_are_told_by_it() -> None:
    sgd = torch.optim.SGD
    assert line(partial(sgd, lr=0.1), partial(sgd, lr=0.2)) == (
        "it: was partial(SGD, lr=0.1), is now partial(SGD, lr=0.2)"
    )
    assert line(nn.MSELoss(), nn.L1Loss()) == "it: was MSELoss(), is now L1Loss()"
    assert line(None, nn.L1Loss()) == "it: was None, is now L1Loss()"
    first = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    second = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    assert line(first, second) == "it: was (1): ReLU(), is now (1): Tanh()"
    assert "label_smoothing" in line(
        nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)
    )


def test_a_name_a_place_and_a_comment_make_no_difference() -> None:
    assert same(
        cell("def it(o): return o + 1"), cell("def f(o):\n  # One more\n  return o + 1\nit = f")
    )


def test_attributes_that_have_the_name_of_a_variable_make_no_difference() -> None:
    source = "def it(o): return o.rows"
    assert same(cell(source, rows=[1]), cell(source, rows=[2]))


def test_another_version_of_a_library_is_no_other_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    before = describe(nn.CrossEntropyLoss())
    monkeypatch.setattr(nn.CrossEntropyLoss, "forward", lambda self, o, t: o)
    assert describe(nn.CrossEntropyLoss()) == before


def test_what_has_no_lasting_form_counts_as_its_type() -> None:
    assert same(threading.Lock(), threading.Lock())
    assert same(partial(print, file=sys.stderr), partial(print, file=sys.stdout))
    assert same(logging.getLogger("a"), logging.getLogger("a"))


def test_objects_that_hold_themselves_can_be_told() -> None:
    def looped() -> Any:
        found: dict[str, Any] = {"k": [1]}
        found["self"] = found
        found["k"].append(found)
        return found

    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    assert same(looped(), looped())
    assert same(deep, deep)


def test_random_generators_are_told_by_where_they_are() -> None:
    assert same(np.random.default_rng(1), np.random.default_rng(1))
    assert not same(np.random.default_rng(1), np.random.default_rng(2))


def net(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(50, 50), nn.BatchNorm1d(50), nn.Linear(50, 2))


def model_line(first: nn.Module, second: nn.Module) -> list[str]:
    return list(differences({"m": describe_model(first)}, {"m": describe_model(second)}))


def test_a_model_is_told_by_its_initial_values_but_for_their_last_bits() -> None:
    assert model_line(net(), net()) == []
    (found,) = model_line(net(), net(2))
    assert found.endswith("differs in its initial values")

    rounded = net()
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.mul_(1 + 1e-7)
    assert model_line(net(), rounded) == []
    with torch.no_grad():
        rounded[0].weight[3, 3] += 0.5
    assert len(model_line(net(), rounded)) == 1


def test_a_model_is_told_by_what_is_no_parameter_too() -> None:
    class Scaled(nn.Module):
        def __init__(self, scale: Any) -> None:
            super().__init__()
            self.scale = scale

    assert "attribute scale" in model_line(Scaled(1.0), Scaled(2.0))[0]
    hooked = net()
    hooked.register_forward_hook(lambda module, inputs, output: output * 2)
    assert "hooks" in model_line(net(), hooked)[0]
    evaluated = net().eval()
    assert model_line(net(), evaluated) == []
    first, second = (Scaled(torch.tensor([3.0, each])[::2]) for each in (1.0, 2.0))
    assert model_line(first, second) == []


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_model_that_was_compiled_is_told_too() -> None:
    scripted = [torch.jit.script(net()) for _ in range(2)]
    assert model_line(scripted[0], scripted[1]) == []


def test_an_optimizer_is_told_by_its_class_and_its_own_attributes() -> None:
    class Own(torch.optim.SGD):
        def __init__(self, parameters: Any, strength: float) -> None:
            super().__init__(parameters, lr=0.1)
            self.strength = strength

    def told(build: Any) -> dict[str, Any]:
        return {"o": describe_optimizer(build(net().parameters()))}

    assert told(partial(Own, strength=1.0)) == told(partial(Own, strength=1.0))
    (found,) = differences(told(partial(Own, strength=1.0)), told(partial(Own, strength=2.0)))
    assert found == "o: Own differs in its attribute strength"
    (found,) = differences(told(torch.optim.SGD), told(torch.optim.Adam))
    assert found == "o: was SGD, is now Adam"


def test_under_another_python_objects_are_told_by_their_names() -> None:
    before = describe(cell("it = lambda o: 1"))
    now = describe(cell("it = lambda o: 2"))
    assert len(list(differences({"it": before}, {"it": now}))) == 1
    before["python"] = "3.0"
    assert list(differences({"it": before}, {"it": now})) == []


def test_functions_wrapped_by_others_are_told_by_both() -> None:
    def wrapped(k: int) -> Any:
        def inner(o: int) -> int:
            return o + k

        return functools.lru_cache(inner)

    assert same(wrapped(1), wrapped(1))
    assert not same(functools.wraps(wrapped(1))(lambda o: o), functools.wraps(other)(lambda o: o))


def test_a_number_that_is_new_each_time_is_named() -> None:
    class Tagged:
        def __init__(self) -> None:
            self.tag = uuid.uuid4()

        def __repr__(self) -> str:
            return "Tagged"

    assert "attribute tag" in line(Tagged(), Tagged())


MEAN = describe(nn.MSELoss())


@every("loss", [{}, {"is": "MSELoss()"}, {**MEAN, "parts": {}, "is": None}, {**MEAN, "parts": 7}])
def test_a_checkpoint_that_says_nothing_of_its_training_is_refused_in_words(loss: Any) -> None:
    with pytest.raises(CheckpointError, match="here does not say what training it belongs to"):
        require_same("here", {"loss": loss}, {"loss": MEAN})


def test_texts_that_differ_in_the_end_of_the_last_line_are_told_apart() -> None:
    ended = {**MEAN, "is": MEAN["is"] + "\n", "parts": {}}
    with pytest.raises(ConfigError, match="loss: was MSELoss"):
        require_same("here", {"loss": ended}, {"loss": MEAN})
