"""The numbers of a training's epochs by name, for frames and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from sparkdl.events import EpochSummary
from sparkdl.report.html import Curve

VALIDATION = "validation_"
COUNTED = ("epoch", "examples", "rounds", "seconds", "validation_examples", "max_staleness")
"""Names that get no curve."""


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


def curves_of(history: Sequence[EpochSummary]) -> list[tuple[str, list[Curve]]]:
    """Whatever numbers the epochs have, by name.

    Returns:
        One entry per chart: its title and its curves. Numbers on held-out rows share the chart of
        the same number in training, if there is one; a curve of zeros is left out.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for epoch in history:
        for name, value in metrics_of(epoch).items():
            found.setdefault(name, []).append((float(epoch.epoch), value))
    charts: dict[str, list[Curve]] = {}
    for name, points in found.items():
        base = name.removeprefix(VALIDATION)
        curves = charts.setdefault(base if base in found else name, [])
        if any(value for _, value in points):
            curves.append(Curve(_label(name, found), points, len(curves)))
    titled = ((name.replace("_", " "), curves) for name, curves in charts.items() if curves)
    return [(name[:1].upper() + name[1:], curves) for name, curves in titled]


def _label(name: str, found: Mapping[str, object]) -> str:
    if name.startswith(VALIDATION) and name.removeprefix(VALIDATION) in found:
        return "validation"
    return "training" if VALIDATION + name in found else name.replace("_", " ")
