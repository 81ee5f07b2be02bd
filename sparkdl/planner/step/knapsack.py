"""One option for each layer under a memory budget, exactly: Zou et al. 2017's choice of algorithms.

    minimise    sum over k of seconds[k, x_k]
    subject to  memory(x) <= budget,  where option x_k of layer k holds h_k bytes until its backward
                pass has run, and needs w_k more while it works:

    sum    memory = sum over k of (h_k + w_k)                  the paper's, all workspaces at once
    max    memory = sum over k of h_k + max over k of w_k      one workspace at a time
    order  memory = max over k of (h_1 + ... + h_k + w_k)      of a step: when layer k's backward
           pass runs, the layers after it have given up what they held

This is the multiple-choice knapsack. Layer by layer, the states that no other one beats in both
memory and seconds are kept (Nemhauser and Ullmann 1969), so nothing is rounded to buckets of bytes;
a state is dropped too where the linear relaxation of the layers after it (Sinha and Zoltners 1979)
shows that it cannot be part of something faster than what is known. The programme itself is known
to us second hand (arXiv 1709.06622, section on mini-batch size and algorithms); "max" and "order"
are derived here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from sparkdl.arguments import as_number, as_whole
from sparkdl.errors import ConfigError

Constraint = Literal["sum", "max", "order"]
_SLACK = 1e-9
"""Relative; bounds are sums of floats in another order than what they bound."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a layer.

    Args:
        name: what it is called.
        seconds: what it takes of a step, forward and backward; >= 0.
        held: bytes that it holds from its forward to its backward pass; >= 0.
        working: bytes that it needs besides while it works; >= 0.

    Raises:
        ConfigError: a number is out of range.
    """

    name: str
    seconds: float
    held: int
    working: int = 0

    def __post_init__(self) -> None:
        seconds = as_number(self.seconds)
        if seconds is None or seconds < 0:
            raise ConfigError(
                f"the option {self.name!r} takes {self.seconds!r} seconds: must be a number >= 0"
            )
        for field in ("held", "working"):
            value = as_whole(getattr(self, field))
            if value is None or not 0 <= value < 2**50:
                raise ConfigError(
                    f"the option {self.name!r} has {field}={getattr(self, field)!r}: must be a "
                    "whole number of bytes >= 0 and < 2**50"
                )
            object.__setattr__(self, field, value)


@dataclass(frozen=True, slots=True)
class Selection:
    """The fastest options that fit.

    Attributes:
        picks: by layer, the position of its option.
        seconds: the sum of theirs.
        memory: bytes, by the constraint.
    """

    picks: tuple[int, ...]
    seconds: float
    memory: int


def memory_of(chosen: Sequence[Option], constraint: Constraint) -> int:
    """The memory that one option for each layer takes, in bytes; see the module."""
    held, working = [each.held for each in chosen], [each.working for each in chosen]
    if constraint == "sum":
        return sum(held) + sum(working)
    if constraint == "max":
        return sum(held) + max(working, default=0)
    so_far = np.cumsum(np.array(held, dtype=object))
    return max((int(a) + b for a, b in zip(so_far, working, strict=True)), default=0)


def fastest(
    layers: Sequence[Sequence[Option]], budget: int, constraint: Constraint = "max"
) -> Selection:
    """Choose one option for each layer.

    Args:
        layers: the options of each layer, in the order of the forward pass.
        budget: bytes.
        constraint: what has to fit into them; see the module.

    Returns:
        The least seconds that fit; among equals, not always the same memory.

    Raises:
        ConfigError: nothing fits, a layer has no options, or an argument is out of range.
    """
    bytes_left = as_whole(budget)
    if bytes_left is None:
        raise ConfigError(f"the budget must be a whole number of bytes, got {budget!r}")
    if constraint not in get_args(Constraint):
        raise ConfigError(f"constraint must be one of {get_args(Constraint)}, got {constraint!r}")
    empty = [index for index, options in enumerate(layers) if not options]
    if empty:
        raise ConfigError(f"layer {empty[0]} has no options to choose from")
    best: tuple[float, tuple[int, ...]] | None = None
    for limit, capacity in _workspaces(layers, bytes_left, constraint):
        tables = [_table(options, limit, constraint) for options in layers]
        ceiling = math.inf if best is None else best[0]
        found = _search(tables, capacity, ceiling)
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    if best is None:
        least = _least_memory(layers, constraint)
        raise ConfigError(
            f"a budget of {bytes_left:,} bytes is too small: even the options that need least take "
            f"{least:,}. Raise the budget, or take smaller minibatches"
        )
    chosen = [options[pick] for options, pick in zip(layers, best[1], strict=True)]
    seconds = math.fsum(each.seconds for each in chosen)
    return Selection(best[1], seconds, memory_of(chosen, constraint))


def _workspaces(
    layers: Sequence[Sequence[Option]], budget: int, constraint: Constraint
) -> Iterator[tuple[int | None, int]]:
    """The most that an option may need while it works, and what that leaves for what is held."""
    if constraint != "max":
        yield None, budget
        return
    least = max((min(option.working for option in options) for options in layers), default=0)
    sizes = {option.working for options in layers for option in options} | {least}
    yield from ((size, budget - size) for size in sorted(sizes) if size >= least)


def _least_memory(layers: Sequence[Sequence[Option]], constraint: Constraint) -> int:
    """The smallest budget that is enough."""
    if constraint == "max":
        sizes = [size for size, _ in _workspaces(layers, 0, constraint) if size is not None]
        return min(
            size + sum(min(o.held for o in options if o.working <= size) for options in layers)
            for size in sizes
        )
    need = 0
    for options in reversed(layers):
        after = need
        need = min(
            o.held + (o.working + after if constraint == "sum" else max(o.working, after))
            for o in options
        )
    return need


@dataclass(frozen=True)
class _Table:
    """A layer's options that may be chosen, arrays of shape (options,)."""

    held: Any
    working: Any
    seconds: Any
    place: Any


def _table(options: Sequence[Option], limit: int | None, constraint: Constraint) -> _Table:
    allowed = [
        (option.held, option.working, option.seconds, place)
        for place, option in enumerate(options)
        if limit is None or option.working <= limit
    ]
    held, working, seconds, place = map(np.array, zip(*allowed, strict=True))
    if constraint == "sum":
        held, working = held + working, 0 * working
    return _Table(held, 0 * working if constraint == "max" else working, seconds, place)


def _search(
    tables: Sequence[_Table], capacity: int, ceiling: float
) -> tuple[float, tuple[int, ...]] | None:
    """The fastest picks that fit and are not slower than the ceiling, with their seconds."""
    rest = np.array([int(each.held.min()) for each in tables] + [0], dtype=np.int64)
    rest = rest[::-1].cumsum()[::-1]
    steps = sorted(
        (gain / size, owner, size, gain)
        for owner, table in enumerate(tables)
        for size, gain in _hull(table)[1]
    )
    owner, size, gain = (np.array([each[i] for each in steps], dtype=float) for i in (1, 2, 3))
    floor = np.array([_hull(each)[0] for each in tables] + [0.0])[::-1].cumsum()[::-1]
    working = max((int(each.working.max()) for each in tables), default=0)
    ceiling = min(ceiling, floor[0] + _rounded(steps, capacity - working - int(rest[0])))
    ceiling += _SLACK * abs(ceiling) if math.isfinite(ceiling) else 0.0

    held, seconds = np.zeros(1, np.int64), np.zeros(1)
    trail = []
    for layer, table in enumerate(tables):
        taken, total = held[:, None] + table.held, seconds[:, None] + table.seconds
        room = capacity - taken - rest[layer + 1]
        after = owner > layer
        bytes_more, saved = (np.append(0.0, each[after].cumsum()) for each in (size, gain))
        bound = total + floor[layer + 1] + np.interp(room, bytes_more, saved)
        fits = (room >= 0) & (taken + table.working <= capacity) & (bound <= ceiling)
        state, option = np.nonzero(fits)
        taken, total = taken[fits], total[fits]
        order = np.lexsort((total, taken))
        before = np.minimum.accumulate(np.append(np.inf, total[order]))[:-1]
        order = order[total[order] < before]
        if not len(order):
            return None
        held, seconds = taken[order], total[order]
        trail.append((state[order], table.place[option[order]]))
    at, picks = len(seconds) - 1, []
    for states, places in reversed(trail):
        picks.append(int(places[at]))
        at = states[at]
    return float(seconds[-1]), tuple(reversed(picks))


def _hull(table: _Table) -> tuple[float, list[tuple[int, float]]]:
    """The lower convex hull of a layer's options.

    Returns:
        The seconds of the option that holds least, and the further bytes and (negative) seconds
        from one corner of the hull to the next.
    """
    points = sorted(zip(table.held.tolist(), table.seconds.tolist(), strict=True))
    corners = [points[0]]
    for point in points[1:]:
        if point[1] >= corners[-1][1]:
            continue
        while len(corners) > 1 and _slope(corners[-2], point) <= _slope(*corners[-2:]):
            corners.pop()
        corners.append(point)
    pairs = itertools.pairwise(corners)
    return corners[0][1], [(b[0] - a[0], b[1] - a[1]) for a, b in pairs]


def _slope(a: tuple[int, float], b: tuple[int, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


def _rounded(steps: Sequence[tuple[float, int, int, float]], room: int) -> float:
    """The seconds that the relaxation's whole steps save; inf where not even none fits."""
    if room < 0:
        return math.inf
    saved, stuck = 0.0, set()
    for _, owner, size, gain in steps:
        if owner in stuck:
            continue
        if size > room:
            stuck.add(owner)
            continue
        room, saved = room - size, saved + gain
    return saved
