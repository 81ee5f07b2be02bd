"""The numbers of a training's epochs by name, for frames and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from sparkdl.events import EpochSummary

VALIDATION = "validation_"
COUNTED = ("epoch", "examples", "rounds", "seconds", "validation_examples", "max_staleness")
"""Names that get no curve."""
Series = tuple[str, list[tuple[float, float]]]
"""A name, and (epoch, value) of each epoch that has one."""


def values_of(epoch: EpochSummary) -> dict[str, Any]:
    """The numbers of an epoch by name, including those that it keeps in dicts by name."""
    values: dict[str, Any] = {}
    for each in fields(epoch):
        value = getattr(epoch, each.name)
        if isinstance(value, Mapping):
            values |= {str(name): number for name, number in value.items()}
        else:
            values[each.name] = value
    return values


def metrics_of(epoch: EpochSummary) -> dict[str, float]:
    """The numbers of an epoch that say how good the model is, or how it was trained, by name."""
    return {
        name: float(value)
        for name, value in values_of(epoch).items()
        if name not in COUNTED and isinstance(value, (int, float))
    }


def series_of(history: Sequence[EpochSummary]) -> list[tuple[str, list[Series]]]:
    """Whatever numbers the epochs have, by name.

    Returns:
        One entry per chart: its title and its series. Numbers on held-out rows share the chart of
        the same number in training, if there is one; a series of zeros is left out.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for epoch in history:
        for name, value in metrics_of(epoch).items():
            found.setdefault(name, []).append((float(epoch.epoch), value))
    charts: dict[str, list[Series]] = {}
    for name, points in found.items():
        base = name.removeprefix(VALIDATION)
        title = base if base in found else name
        if any(value for _, value in points):
            charts.setdefault(title, []).append((_label(name, found), points))
    return [(_title(name), series) for name, series in charts.items()]


def _title(name: str) -> str:
    words = name.replace("_", " ")
    return words[:1].upper() + words[1:]


def _label(name: str, found: Mapping[str, object]) -> str:
    if name.startswith(VALIDATION) and name.removeprefix(VALIDATION) in found:
        return "validation"
    return "training" if VALIDATION + name in found else name.replace("_", " ")
