"""What a coordinator has decided, as tests spell and read it: ``do.skip(2)``, ``reply.member``."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from sparkdl.averager.coordination.actions import Actions, Decision

UNSAID: dict[str, dict[str, Any]] = {
    "drop": {"why": ""},
    "end": {"stopped": None},
    "receive": {"staleness": 0},
    "send_gathered": {"commit": False},
}
"""By action, what a test need not say."""


class Told(Decision):
    """A decision whose arguments can be asked for by name; why somebody is dropped is in none."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        names = list(inspect.signature(getattr(Actions, self.action)).parameters)[1:]
        given = dict(zip(names, self.arguments, strict=False)) | self.options
        if name not in given:
            raise AttributeError(f"{self.action} has no {name}")
        return given[name]


def told(decisions: Iterable[Decision]) -> list[Told]:
    """Decisions as they can be compared and read."""
    return [
        do.drop(each.arguments[0]) if each.action == "drop" else Told(*each) for each in decisions
    ]


class Kind:
    """One action: called with its arguments it is a decision, and ``isinstance`` knows its kind."""

    def __init__(self, action: str) -> None:
        self.action = action
        self._parameters = list(inspect.signature(getattr(Actions, action)).parameters.values())[1:]

    def __call__(self, *arguments: Any, **options: Any) -> Told:
        names = [each.name for each in self._parameters]
        given = dict(zip(names, arguments, strict=False)) | options
        given = UNSAID.get(self.action, {}) | given
        assert given.keys() == set(names), f"{self.action} needs {names}"
        by_name = {each.name for each in self._parameters if each.kind is each.KEYWORD_ONLY}
        return Told(
            self.action,
            tuple(given[name] for name in names if name not in by_name),
            {name: given[name] for name in names if name in by_name},
        )

    def __instancecheck__(self, decision: Any) -> bool:
        return isinstance(decision, Decision) and decision.action == self.action


class _Do:
    def __getattr__(self, action: str) -> Kind:
        return Kind(action)


do: Any = _Do()
