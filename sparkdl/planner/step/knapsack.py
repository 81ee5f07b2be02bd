"""One option for each layer under a memory budget, exactly: Zou et al. 2017's choice of algorithms.

    minimise    sum over k of seconds[k, x_k]
    subject to  sum over k of bytes[k, x_k] <= budget,  x_k an option of layer k

This is the multiple-choice knapsack, solved as an integer programme (HiGHS, by SciPy). It is known
to us second hand (arXiv 1709.06622, section on mini-batch size and algorithms).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparkdl.errors import ConfigError, SetupError


def fastest(layers: Sequence[Sequence[tuple[float, int]]], budget: int) -> list[int]:
    """Choose one option for each layer: those that together take the least seconds and fit.

    Args:
        layers: the options of each layer, as seconds >= 0 and bytes >= 0.
        budget: bytes for all layers together.

    Returns:
        By layer, the position of its option.

    Raises:
        ConfigError: nothing fits, or a layer has no options.
        SetupError: SciPy is not installed.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    except ImportError as error:
        raise SetupError(
            "choosing options within a memory budget needs SciPy, which is not installed here: "
            "pip install 'sparkdl-torch[planning]'"
        ) from error
    if not all(layers):
        raise ConfigError("a layer has no options to choose from")
    least = sum(min(size for _, size in options) for options in layers)
    if not budget >= least:
        raise ConfigError(
            f"a budget of {budget:,} bytes is too small: even the options that need least take "
            f"{least:,}. Raise the budget, or take smaller minibatches"
        )
    if not layers:
        return []
    seconds, sizes = np.array([each for options in layers for each in options], dtype=float).T
    layer_of = np.repeat(np.arange(len(layers)), [len(options) for options in layers])
    one_each = layer_of == np.arange(len(layers))[:, None]
    unit, capacity = max(1.0, sizes.max()), budget
    while True:
        found = milp(
            seconds,
            integrality=np.ones_like(seconds),
            bounds=Bounds(0, 1),
            constraints=[
                LinearConstraint(csr_array(one_each * 1.0), 1, 1),
                LinearConstraint(sizes / unit, -np.inf, capacity / unit),
            ],
            options={"mip_rel_gap": 0.0},
        )
        picks = [int(found.x[own].argmax()) for own in one_each]
        taken = sum(options[pick][1] for options, pick in zip(layers, picks, strict=True))
        if taken <= budget:
            return picks
        capacity -= taken - budget  # what the solver takes for equal is some bytes apart
