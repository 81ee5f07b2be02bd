"""Saved estimators: whatever their specs name, nothing may run that the caller has not named."""

from __future__ import annotations

import functools
import json
import os
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
from sparkdl import TorchEstimator
from sparkdl.estimator.persistence import OBJECTS
from sparkdl.strategies import ParameterAveraging

METADATA = "metadata/part-00000"
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
"""What a hostile file would name; names that would harm the machine are left out."""
SPEC_ODD = [
    *ODD,
    *({"import": name} for name in NAMES),
    *({"new": {"import": name}, "kwargs": {}} for name in NAMES[:12]),
    *({"partial": {"import": name}, "args": [1], "kwargs": {}} for name in NAMES[:6]),
    *({"pickle": name} for name in ("model.pkl", "../outside.pkl", "/etc/hostname", "", None)),
    *({"tuple": [1]}, {"list": 5}, {"dict": {"a": {"import": NAMES[0]}}}, {"kwargs": {}}),
]


class Canary:
    """Detects whether code ran that nobody has named; a context manager."""

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
        """Check that none of the canary's code has run.

        Raises:
            Fault: some of it has.
        """
        sung = os.environ.pop("FUZZING_SUNG", "")
        sys.modules.pop(CANARY, None)
        if sung:
            raise Fault(f"code ran that nobody has named: {sung.split()[-1]}")


class ObjectSpecTarget(Target):
    """A directory as ``TorchEstimator.save`` writes it, loaded with or without trust.

    With trust, everything may run that the specs name, but no file outside the directory.
    """

    name = "object_spec"
    reads = ("checkpoint/object_spec.py", "estimator/persistence.py")
    deadline_s = 5.0

    def __enter__(self) -> ObjectSpecTarget:
        self._canary = self.enter_context(Canary())
        self._folder = self._canary.folder / "saved"
        estimator = TorchEstimator(
            model=functools.partial(nn.Linear, 4, 2),
            loss=nn.CrossEntropyLoss(label_smoothing=0.1),
            optimizer=functools.partial(torch.optim.Adam, betas=(0.9, 0.99)),
            scheduler=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2),
            strategy=ParameterAveraging(period=5),
        )
        estimator.save(str(self._folder))
        (self._folder / "model.pkl").write_bytes(pickle.dumps(nn.Linear))
        (self._canary.folder / "outside.pkl").write_bytes(self._canary.pickled())
        self._objects: dict[str, Any] = json.loads((self._folder / OBJECTS).read_text())
        self._metadata: dict[str, Any] = json.loads((self._folder / METADATA).read_text())
        return self

    def attempt(self, draw: random.Random) -> bool:
        """One directory."""
        changes, objects, metadata = number_of_changes(draw), self._objects, self._metadata
        kind, trust = draw.randrange(10), False
        if kind == 0:
            metadata = mutated(draw, metadata, changes)
        elif kind == 1:
            outside = draw.choice(["../outside.pkl", str(self._canary.folder / "outside.pkl")])
            name = draw.choice(list(objects))
            spec = {"pickle": draw.choice(["model.pkl", outside, outside, "x/../../outside.pkl"])}
            objects, trust = {**objects, name: {"recipe": spec}}, True
        else:
            # Only in one of them, lest the first wrong one hide the others.
            name = draw.choice(list(objects))
            objects = {**objects, name: mutated(draw, objects[name], changes, SPEC_ODD)}
            if draw.random() < 0.1:
                objects = mutated(draw, objects, 1, SPEC_ODD)
        (self._folder / OBJECTS).write_text(as_text(objects))
        (self._folder / METADATA).write_text(as_text(metadata))
        try:
            TorchEstimator.load(str(self._folder), trust=trust)
        finally:
            self._canary.require_silence()
        return True
