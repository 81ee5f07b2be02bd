"""How many rows a minibatch should have, from what a step takes and how noisy gradients are.

With B rows in a step of all workers, and the gradients' noise scale N, a training needs about

    steps(B) = steps(infinity) * (1 + N / B)            rows(B) = rows(0) * (1 + B / N)

to a given loss (McCandlish et al. 2018, arXiv 1812.06162; from memory, where it reads
(S / S_min - 1) (E / E_min - 1) = 1), so the first to be there is the minibatch with the least
seconds a step * (1 + N / B). Where the noise scale is not known, only rows a second can be
compared, and the smallest minibatch is taken that has nearly as many as any. Learning rates follow:

    SGD    lr(B) ~ 1 / (1 + N / B), or ~ B (Goyal et al. 2017) where N is not known
    Adam   the square root of that: lr ~ B ** a with a from 0.5 to 1 is what is reported
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from sparkdl.arguments import require_positive, require_whole
from sparkdl.errors import ConfigError

Rule = Literal["sgd", "adam"]
ENOUGH = 0.9
"""Of the most rows a second, where the noise scale is not known."""


@dataclass(frozen=True)
class BatchChoice:
    """A minibatch.

    Attributes:
        batch_size: rows of a worker's minibatch.
        because: why.
        table: what there was to choose from: arrays ``batch_size``, ``step_s``, ``rows_a_second``
            and ``to_target``, the seconds to a given loss over those of the choice; the latter only
            if there is a noise scale.
    """

    batch_size: int
    because: str
    table: dict[str, Any]


def choose_batch(
    step_s: Mapping[int, float],
    *,
    workers: int = 1,
    noise_scale: float | None = None,
    largest: int | None = None,
) -> BatchChoice:
    """Choose the minibatch that reaches a given loss first.

    Args:
        step_s: by rows of a worker's minibatch, the seconds of a step with its part of the
            exchange, > 0: measured, or those of ``plan_blocks`` under a memory budget.
        workers: how many train at once.
        noise_scale: in rows, from the history of ``GradientAllReduce(measure_noise=True)``: as it
            grows, the mean of the epochs until the loss is reached. None where it is not known.
        largest: the most rows that fit into memory, from ``StepMemory.largest_batch``.

    Raises:
        ConfigError: nothing fits, or an argument is wrong.

    Source: Zou et al. 2017 (arXiv 1709.06622), procedure for the mini-batch size.
    """
    workers = require_whole("workers", workers, 1)
    noise = (
        None if noise_scale is None else require_positive("noise_scale", noise_scale, or_zero=True)
    )
    limit = math.inf if largest is None else require_whole("largest", largest, 1)
    found = {
        require_whole("rows in step_s", b, 1): require_positive("seconds", s)
        for b, s in step_s.items()
    }
    sizes = np.array(sorted(each for each in found if each <= limit))
    if not len(sizes):
        raise ConfigError(
            f"step_s has the minibatches {sorted(found)}, of which none has at most {limit} rows, "
            "the most that fit into memory. Measure smaller ones"
        )
    seconds = np.array([found[int(each)] for each in sizes])
    speed = workers * sizes / seconds
    table = {"batch_size": sizes, "step_s": seconds, "rows_a_second": speed}
    if noise is None:
        place = int(np.argmax(speed >= ENOUGH * speed.max()))
        because = (
            f"it is the smallest that trains at least {ENOUGH:.0%} of the most rows a second; the "
            "noise scale, from GradientAllReduce(measure_noise=True), would tell how many it needs"
        )
    else:
        to_target = seconds * (1 + noise / (workers * sizes))
        place = int(to_target.argmin())
        table["to_target"] = to_target / to_target[place]
        because = (
            f"with a noise scale of {noise:.4g} rows and {workers * int(sizes[place])} rows a step "
            "a given loss is reached first"
        )
    if place == len(sizes) - 1:
        because += "; a larger one may be better still" + (
            ", but does not fit into memory" if any(each > limit for each in found) else ""
        )
    return BatchChoice(int(sizes[place]), because, table)


def learning_rate(
    rate: float,
    *,
    rows: int,
    to_rows: int,
    noise_scale: float | None = None,
    rule: Rule = "sgd",
) -> float:
    """The learning rate for steps of other size.

    Args:
        rate: that of steps with ``rows``.
        rows: of all workers in a step.
        to_rows: likewise, with the new rate.
        noise_scale: in rows; None where it is not known.
        rule: for ``"sgd"`` with or without momentum, or for ``"adam"`` and its kin.

    Raises:
        ConfigError: an argument is wrong.
    """
    rows, to_rows = require_whole("rows", rows, 1), require_whole("to_rows", to_rows, 1)
    if rule not in get_args(Rule):
        raise ConfigError(f"rule must be one of {get_args(Rule)}, got {rule!r}")
    gain = to_rows / rows
    if noise_scale is not None:
        noise = require_positive("noise_scale", noise_scale, or_zero=True)
        gain = (1 + noise / rows) / (1 + noise / to_rows)
    return require_positive("rate", rate) * (gain if rule == "sgd" else math.sqrt(gain))
