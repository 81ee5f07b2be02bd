"""Recipes of objects: whatever they name, nothing may run that the caller has not named."""

from __future__ import annotations

import functools
import pickle
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fuzzing.loop import Fault, Target
from fuzzing.mutation import ODD, as_text, mutated, number_of_changes
from sparkdl.checkpoint.recipe import load_recipe, save_recipe
from sparkdl.strategies import ParameterAveraging

CANARY = "fuzzing_canary"
"""A module that notes that it was imported, called or unpickled."""
SOURCE = """
import os
sung = os.environ.setdefault("FUZZING_SUNG", "")
os.environ["FUZZING_SUNG"] += "imported "
def sing(*arguments, **named):
    os.environ["FUZZING_SUNG"] += "called "
class Bird:
    def __init__(self, *arguments, **named):
        sing()
    def __reduce__(self):
        return sing, ()
"""
NAMES = [
    *(f"{CANARY}:sing", f"{CANARY}:Bird", f"{CANARY}:os.getpid", f"{CANARY}.more:sing"),
    *("os:getcwd", "builtins:len", "builtins:dict", "torch:nn.Linear", "torch.nn:Module.__init__"),
    *("torch.nn.modules.linear:Linear", "torch.optim.sgd:SGD", "torch.nn:Sequential", ":", "a:b:c"),
    *("torch.nn.modules.linear:Linear.__init__.__globals__", "sparkdl.strategies:__doc__"),
    *("torch.nn.modules.linear:torch.os.getcwd", "functools:partial", "operator:attrgetter"),
]
"""What a hostile file would name; those that do something to the machine are left out."""
RECIPE_ODD = [
    *ODD,
    *({"import": name} for name in NAMES),
    *({"new": {"import": name}, "kwargs": {}} for name in NAMES[:12]),
    *({"partial": {"import": name}, "args": [1], "kwargs": {}} for name in NAMES[:6]),
    *({"pickle": name} for name in ("model.pkl", "../outside.pkl", "/etc/hostname", "", None)),
    *({"tuple": [1]}, {"list": 5}, {"dict": {"a": {"import": NAMES[0]}}}, {"kwargs": {}}),
]


class Canary:
    """Sees whether code ran that nobody has named; a context manager."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fuzzing-"))
        (self.folder / f"{CANARY}.py").write_text(SOURCE)

    def __enter__(self) -> Canary:
        sys.path.insert(0, str(self.folder))
        return self

    def __exit__(self, *_: object) -> None:
        sys.path.remove(str(self.folder))
        shutil.rmtree(self.folder)

    def pickled(self) -> bytes:
        """A pickle that sings when it is loaded."""
        return f"c{CANARY}\nsing\n(tR.".encode()

    def require_silence(self) -> None:
        """Check that nothing of it has run.

        Raises:
            Fault: something has.
        """
        import os

        sung = os.environ.pop("FUZZING_SUNG", "")
        sys.modules.pop(CANARY, None)
        if sung:
            raise Fault(f"code ran that nobody has named: {sung.split()[-1]}")


class RecipeTarget(Target):
    """One recipe, of a model, an optimizer, a loss or a strategy."""

    name = "recipe"
    reads = ("checkpoint/recipe.py",)
    deadline_s = 5.0

    def __enter__(self) -> RecipeTarget:
        self._canary = Canary().__enter__()
        self._folder = self._canary.folder / "saved"
        self._folder.mkdir()
        (self._folder / "model.pkl").write_bytes(pickle.dumps(5))
        (self._canary.folder / "outside.pkl").write_bytes(self._canary.pickled())
        values: list[Any] = [
            functools.partial(nn.Linear, 4, 2),
            nn.CrossEntropyLoss(label_smoothing=0.1),
            functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
            functools.partial(torch.optim.Adam, betas=(0.9, 0.99)),
            nn.ReLU,
            ParameterAveraging(period=5),
        ]
        self._recipes = [save_recipe(value, self._folder, "model") for value in values]
        self._recipes += [{"recipe": {"pickle": "model.pkl"}}]
        return self

    def __exit__(self, *_: object) -> None:
        self._canary.__exit__()

    def attempt(self, draw: random.Random) -> bool:
        """One recipe; the files are trusted now and then, but only those of the directory."""
        saved = mutated(draw, draw.choice(self._recipes), number_of_changes(draw), RECIPE_ODD)
        trusted = "pickle" in str(saved) and draw.random() < 0.3
        try:
            saved = _parsed(saved)
            load_recipe(saved, self._folder, "model", trust=trusted)
        finally:
            if not trusted or "outside" in str(saved):
                self._canary.require_silence()
        return True


def _parsed(saved: Any) -> Any:
    """As a file would have it, or unread where that is no JSON."""
    import json

    try:
        return json.loads(as_text(saved))
    except (ValueError, RecursionError):
        return saved
