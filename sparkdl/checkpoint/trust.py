"""Whose code loading may run: torch's, which is harmless to call, and what the user names.

A saved model says by name what it is made of. Names of torch's own classes are looked up in a
table, never imported. Anything else is imported only from modules that the user trusts.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import types
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sparkdl.errors import ConfigError
from sparkdl.user_code.tracebacks import text_of

TrustArgument = bool | Collection[str]
"""What the user says: True for everything, pickles included, or names of modules and packages."""


@dataclass(frozen=True)
class Trust:
    """What loading may run besides torch's own classes.

    Attributes:
        everything: any module, and pickles.
        modules: names of modules, and of packages with all modules in them.
    """

    everything: bool = False
    modules: frozenset[str] = frozenset()

    @staticmethod
    def of(given: TrustArgument) -> Trust:
        """Combine what a call says with the ``with`` blocks around it.

        Raises:
            ConfigError: it is neither a bool nor names of modules.
        """
        around = _around.get(Trust())
        if isinstance(given, bool):
            return Trust(given or around.everything, around.modules)
        listed = isinstance(given, Collection) and not isinstance(given, str)
        if not listed or not all(map(_is_module_name, given)):
            raise ConfigError(
                "trust must be True, False or a list of modules such as ['mypackage.models'], got "
                f"{given!r}"
            )
        return Trust(around.everything, around.modules.union(given))

    def covers(self, module: str) -> bool:
        """Whether what is defined in a module may be called."""
        if self.everything or module in self.modules:
            return True
        *packages, last = module.split(".")
        # A package's __main__ is a program: importing it would run it.
        return last != "__main__" and any(
            ".".join(packages[:depth]) in self.modules for depth in range(1, len(packages) + 1)
        )


_around: contextvars.ContextVar[Trust] = contextvars.ContextVar("sparkdl_trust")


def trusted_pickles() -> contextlib.AbstractContextManager[None]:
    """Trust everything inside a ``with`` block, for example for ``PipelineModel.load``.

    A pickle runs code of its author's choice: use it only on files that you trust.
    """
    return _trusted(True)


def trusted_modules(*modules: str) -> contextlib.AbstractContextManager[None]:
    """Trust modules inside a ``with`` block, for example for ``PipelineModel.load``.

    Loading there may import them and call what they define with arguments from the files; pickles
    are refused as usual.

    Args:
        modules: names such as ``mypackage.models``; a package stands for all modules in it.

    Raises:
        ConfigError: a name is not a module's name.
    """
    return _trusted(modules)


@contextlib.contextmanager
def _trusted(given: TrustArgument) -> Iterator[None]:
    before = _around.set(Trust.of(given))
    try:
        yield
    finally:
        _around.reset(before)


class NotFoundError(Exception):
    """A trusted module cannot be imported, or lacks what it is said to have."""


def find(path: str, trust: Trust, harmless: dict[str, Any]) -> Any:
    """What a name stands for; imports only trusted modules.

    Args:
        path: ``module:qualified name``.
        trust: says which modules may be imported.
        harmless: what needs no trust, by path.

    Raises:
        NotFoundError: there is no such thing.
    """
    if path in harmless:
        return harmless[path]
    module, _, name = path.partition(":")
    if not trust.covers(module):
        raise NotFoundError(f"{module} is not trusted")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
            home = getattr(found, "__module__", None)
            # Through what a module has imported, one could reach any other.
            if not isinstance(home, str) or not trust.covers(home):
                raise AttributeError(f"{part} belongs to {home}, which trust does not name")
    except Exception as error:  # importing runs the module, which may raise anything
        raise NotFoundError(text_of(error)) from error
    return found


def classes_of(namespace: types.ModuleType, base: type) -> dict[str, Any]:
    """The public subclasses of ``base`` that a package itself defines, by import path."""
    return {
        f"{value.__module__}:{value.__qualname__}": value
        for name, value in vars(namespace).items()
        if isinstance(value, type)
        and issubclass(value, base)
        and not name.startswith("_")
        and f"{value.__module__}.".startswith(f"{namespace.__name__}.")
    }


@functools.cache
def torchs_own() -> dict[str, Any]:
    """Torch's modules, losses, optimizers and schedulers, by import path.

    Called with data, or with each other, they compute, keep what they are given and allocate
    memory. Of ``torch.nn.functional``, only what is written in Python has a path.
    """
    functional = torch.nn.functional
    modules = classes_of(torch.nn.modules, torch.nn.Module)
    return {
        # A ParameterDict sets attributes on itself under whatever names it is given.
        **{path: kind for path, kind in modules.items() if kind is not torch.nn.ParameterDict},
        **classes_of(torch.optim, torch.optim.Optimizer),
        **classes_of(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler),
        **{
            f"{functional.__name__}:{name}": value
            for name, value in vars(functional).items()
            if isinstance(value, types.FunctionType)
            and (value.__module__, value.__qualname__) == (functional.__name__, name)
            and not name.startswith("_")
        },
    }


def _is_module_name(name: object) -> bool:
    return isinstance(name, str) and all(part.isidentifier() for part in name.split("."))
