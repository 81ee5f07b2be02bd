"""Keep torch from importing its compiler needlessly.

The first step of a process's first optimizer makes torch import ``torch._dynamo``, only to declare
that nothing is to be compiled there: 0.9 s of CPU in every worker. Until somebody wants more of the
compiler than that, a stand-in takes its place.

Workers' processes keep it. In the driver's process, which is the user's own, it is there during a
``fit`` and gone afterwards. Only versions of torch whose use of the compiler is known get it;
others import the compiler as usual.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

COMPILER = "torch._dynamo"
TESTED = ("2.13", "2.14")
"""Versions of torch with which this module has been tested."""


def defer_compiler() -> None:
    """Unless the compiler is already imported, defer its import to its first use, for good."""
    if torch.__version__.startswith(tuple(f"{each}." for each in TESTED)):
        sys.modules.setdefault(COMPILER, _STAND_IN)


@contextmanager
def compiler_deferred() -> Iterator[None]:
    """Defer the import of the compiler for some time, in a process that is the user's own."""
    defer_compiler()
    try:
        yield
    finally:
        _STAND_IN.leave()


class _CompilerToCome(ModuleType):
    """Stands in for the compiler as long as only eager code asks for it; then steps aside."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        # What torch.distributed asks: nothing is cached yet, and all settings are the defaults.
        self.trace_rules = _PartToCome(self, "trace_rules", clear_lru_cache=lambda: None)
        self.utils = _PartToCome(self, "utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")
        self._leaving = threading.Lock()

    def graph_break(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: outside of compiled code there is no graph to break."""

    def disable(self, function: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Exempt a function from compilation, which takes nothing until the compiler is there."""
        if kwargs.get("wrapping", True):  # not torch keeping its own function out of graphs
            return self._arrive().disable(function, *args, **kwargs)

        @functools.lru_cache(maxsize=1)
        def disabled() -> Callable[..., Any]:
            made: Callable[..., Any] = self._arrive().disable(function, *args, **kwargs)
            return made

        def run(*arguments: Any, **options: Any) -> Any:
            ready = function if sys.modules.get(COMPILER) is self else disabled()
            return ready(*arguments, **options)

        return run

    def __getattr__(self, name: str) -> Any:
        # Code that merely scans the loaded modules asks for such names; __path__ means an import.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if name == "__path__":
            sys.meta_path.insert(0, _ArrivedMeanwhile())
        return getattr(self._arrive(), name)

    def leave(self) -> None:
        """Step aside, so that the compiler is imported as usual from here on."""
        with self._leaving:  # another thread may import the compiler itself meanwhile
            if sys.modules.get(COMPILER) is self:
                del sys.modules[COMPILER]

    def _arrive(self) -> ModuleType:
        self.leave()
        return importlib.import_module(COMPILER)


class _PartToCome:
    """Stands in for a module of the compiler that eager code asks a single question."""

    def __init__(self, compiler: _CompilerToCome, name: str, **answers: Callable[[], Any]) -> None:
        self._compiler, self._name = compiler, name
        vars(self).update(answers)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(getattr(self._compiler._arrive(), self._name), name)


class _ArrivedMeanwhile(MetaPathFinder, Loader):
    """Keeps importlib from loading a module of the compiler twice.

    An import of a submodule asks its parent, the stand-in, for a path; that imports the whole
    compiler, so the submodule is already there when importlib goes on to load it.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Called by importlib for every import; ``target`` is what a reload is about."""
        if target is not None or not name.startswith(f"{COMPILER}.") or name not in sys.modules:
            return None
        return ModuleSpec(name, self, loader_state=sys.modules[name])

    def exec_module(self, module: ModuleType) -> None:
        """Called by importlib with a new module, which the one already there replaces."""
        assert module.__spec__ is not None
        sys.modules[module.__name__] = module.__spec__.loader_state


_STAND_IN = _CompilerToCome(COMPILER)
"""The only one: functions that torch has had it disable ask whether it still stands in."""
