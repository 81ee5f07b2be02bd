"""By how much a benchmark is worse than in another checkout, as benchmarks/side_by_side.py says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

from side_by_side import compare


def run(**ratios: float) -> dict[str, Any]:
    """Claims of a run; of those named ``speed`` more is better."""
    bounds = {True: "at least", False: "at most"}
    return {
        name: {"name": name, "ratio": ratio, "bound": bounds[name == "speed"]}
        for name, ratio in ratios.items()
    }


def test_a_longer_time_and_a_lower_speed_are_worse() -> None:
    time, speed = compare([run(time=2.2, speed=2.0)], [run(time=2.0, speed=2.2)])
    assert time.ratio == pytest.approx(1.1)
    assert speed.ratio == pytest.approx(1.1)
    assert not time.met


def test_the_median_of_the_turns_counts() -> None:
    here = [run(time=1.0), run(time=9.0), run(time=1.02)]
    (claim,) = compare(here, [run(time=1.0)] * 3)
    assert claim.ratio == pytest.approx(1.02)
    assert claim.met


def test_nothing_in_both_is_no_worse_and_something_beside_nothing_is_any_number_of_times() -> None:
    none, some = compare([run(threads=0.0, memory=1.0)], [run(threads=0.0, memory=0.0)])
    assert none.ratio == 1.0
    assert some.ratio == float("inf")
    assert not some.met


def test_a_claim_that_only_one_of_them_makes_is_left_out() -> None:
    claims = compare([run(time=1.0, memory=3.0)], [run(time=1.0, speed=3.0)])
    assert [claim.name for claim in claims] == ["time, times worse than there"]


def test_two_without_a_claim_in_common_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no claim in common: here \['time'\]"):
        compare([run(time=1.0)], [run(speed=3.0)])
