"""Das et al.'s five speed-ups, from the hardware that is known and two fitted assumptions."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from published import FRAMES, MESSAGE_S, OVERFEAT_FAST, RUNS, SPEECH, VGG_A


def test_all_five_are_within_a_tenth() -> None:
    for run in RUNS:
        assert run.predicted() == pytest.approx(run.speedup, rel=0.1), run.name


def test_no_other_cost_of_a_message_fits_much_better() -> None:
    def misfit(message_s: float) -> float:
        return sum(math.log(run.predicted(message_s) / run.speedup) ** 2 for run in RUNS)

    costs = np.arange(0, 60e-6, 1e-6)
    best = min(costs, key=misfit)
    assert abs(best - MESSAGE_S) <= 2e-6
    assert misfit(0.0) > 20 * misfit(best)


def test_no_other_power_of_two_is_the_minibatch_of_speech() -> None:
    (speech,) = (run for run in RUNS if run.layers is SPEECH)
    sizes = [2**k for k in range(6, 14)]
    misfits = [abs(math.log(replace(speech, rows=n).predicted() / speech.speedup)) for n in sizes]
    assert sizes[int(np.argmin(misfits))] == FRAMES


def test_the_networks_have_the_operations_and_weights_that_are_known() -> None:
    """7.485 and 2.671 G multiplications an image, 36.9 and 63.9 MB in the convolutions."""
    for layers, multiplications, megabytes in (
        (VGG_A, 7.485, 36.9),
        (OVERFEAT_FAST, 2.671, 63.9),
    ):
        convolutions = [each for each in layers if each.kind == "Conv2d"]
        assert sum(e.flop for e in convolutions) / 6e9 == pytest.approx(multiplications, abs=1e-3)
        assert sum(e.gradient_bytes for e in convolutions) / 1e6 == pytest.approx(
            megabytes, abs=0.05
        )
