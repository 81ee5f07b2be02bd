"""One option for each layer under a memory budget, exactly: Zou et al. 2017's choice of algorithms.

    minimise    sum over k of seconds[k, x_k]
    subject to  memory(x) <= budget,  where option x_k of layer k holds h_k bytes until its backward
                pass has run, and needs w_k more while it works:

    sum    memory = sum over k of (h_k + w_k)                  the paper's, all workspaces at once
    max    memory = sum over k of h_k + max over k of w_k      one workspace at a time
    order  memory = max over k of (h_1 + ... + h_k + w_k)      of a step: when layer k's backward
           pass runs, the layers after it have given up what they held

This is the multiple-choice knapsack, solved as an integer programme (HiGHS, by SciPy). It is known
to us second hand (arXiv 1709.06622, section on mini-batch size and algorithms); "max" and "order"
are derived here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from sparkdl.arguments import as_number, as_whole
from sparkdl.errors import ConfigError, SetupError

Constraint = Literal["sum", "max", "order"]


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
        SetupError: SciPy is not installed.
    """
    bytes_left = as_whole(budget)
    if bytes_left is None:
        raise ConfigError(f"the budget must be a whole number of bytes, got {budget!r}")
    if constraint not in get_args(Constraint):
        raise ConfigError(f"constraint must be one of {get_args(Constraint)}, got {constraint!r}")
    empty = [index for index, options in enumerate(layers) if not options]
    if empty:
        raise ConfigError(f"layer {empty[0]} has no options to choose from")
    if not layers:
        return Selection((), 0.0, 0)
    capacity = bytes_left
    while (picks := _solved(layers, constraint, capacity)) is not None:
        chosen = [options[pick] for options, pick in zip(layers, picks, strict=True)]
        memory = memory_of(chosen, constraint)
        if memory <= bytes_left:
            return Selection(picks, math.fsum(each.seconds for each in chosen), memory)
        capacity -= memory - bytes_left  # what the solver takes for equal is some bytes apart
    picks = _solved(layers, constraint)
    assert picks is not None
    least = memory_of([o[pick] for o, pick in zip(layers, picks, strict=True)], constraint)
    raise ConfigError(
        f"a budget of {bytes_left:,} bytes is too small: even the options that need least take "
        f"{least:,}. Raise the budget, or take smaller minibatches"
    )


def _solved(
    layers: Sequence[Sequence[Option]], constraint: Constraint, capacity: int | None = None
) -> tuple[int, ...] | None:
    """The picks of least seconds within the capacity, if any; without one, of least memory.

    One variable for each option, one for the largest workspace and one for the memory.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    except ImportError as error:
        raise SetupError(
            "choosing options within a memory budget needs SciPy, which is not installed here: "
            "pip install 'sparkdl-torch[planning]'"
        ) from error
    if capacity is not None and capacity < 0:
        return None
    options = [option for layer in layers for option in layer]
    layer_of = np.repeat(np.arange(len(layers)), [len(layer) for layer in layers])
    count, one_each = len(options), layer_of == np.arange(len(layers))[:, None]
    unit = max(1, *(option.held + option.working for option in options))
    held, working = (
        np.array([getattr(option, name) / unit for option in options])
        for name in ("held", "working")
    )
    seconds = np.array([option.seconds for option in options])
    rows = [np.append(held + (working if constraint == "sum" else 0), [constraint == "max", -1])]
    if constraint == "max":
        rows += [np.append(working * own, [-1, 0]) for own in one_each]
    if constraint == "order":
        so_far = layer_of <= np.arange(len(layers))[:, None]
        rows = [
            np.append(held * until + working * own, [0, -1])
            for until, own in zip(so_far, one_each, strict=True)
        ]
    most = np.inf if capacity is None else capacity / unit
    found = milp(
        np.append(seconds if capacity is not None else 0 * seconds, [0, capacity is None]),
        integrality=np.append(np.ones(count), [0, 0]),
        bounds=Bounds(0, np.append(np.ones(count), [np.inf, most])),
        constraints=[
            LinearConstraint(csr_array(np.pad(one_each * 1.0, ((0, 0), (0, 2)))), 1, 1),
            LinearConstraint(csr_array(np.array(rows)), -np.inf, 0),
        ],
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        return None
    taken = found.x[:count] > 0.5
    return tuple(int(np.flatnonzero(taken[own])[0]) for own in one_each)
