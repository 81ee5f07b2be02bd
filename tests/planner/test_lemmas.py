"""The lemmas' closed forms, and links in words."""

from __future__ import annotations

import math
from typing import Any

import pytest
from every_row import every, every_row
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.errors import ConfigError
from sparkdl.planner.links import Link, least_period, most_workers

OVERHEADS = st.floats(1e-4, 10)
EFFICIENCIES = st.floats(0.05, 1)


def efficiency(workers: int, overhead: float) -> float:
    return (1 + overhead) / (1 + workers * overhead)


@given(overhead=OVERHEADS, alpha=EFFICIENCIES)
def test_one_worker_more_would_be_less_efficient(overhead: float, alpha: float) -> None:
    most = int(most_workers(overhead, alpha))
    assert efficiency(most, overhead) >= alpha - 1e-6
    assert efficiency(most + 1, overhead) < alpha


def test_without_an_overhead_nothing_limits_the_workers_and_only_one_is_as_efficient_as_one() -> (
    None
):
    assert most_workers(0.0, 0.8) == math.inf
    assert most_workers(0.3, 1.0) == 1


@every_row((1.25e9, 2), (0.125e9, 16))
def test_lemma_2_for_alexnet_on_four_workers(bandwidth: float, servers: int) -> None:
    """244 MB, a step of one second: 10 GbE needs 2 servers or steps a round, 1 GbE needs 16."""
    assert least_period(244e6, 4, bandwidth, 1.0) == servers


@given(workers=st.integers(1, 64), step_s=st.floats(1e-3, 1))
def test_from_the_least_period_on_a_round_takes_no_longer_than_its_steps(
    workers: int, step_s: float
) -> None:
    sent, bandwidth = 1e6, 12.5e6
    round_s = 2 * sent * workers / bandwidth
    by_counting = next(p for p in range(1, 100_000) if p * step_s >= round_s * (1 - 1e-9))
    assert least_period(sent, workers, bandwidth, step_s) == by_counting


NO_EFFICIENCIES = [0, -0.1, 1.01, float("nan"), "0.8", True, None]


@every(
    ("lemma", "arguments", "words"),
    [
        *(
            (most_workers, (0.1, each), r"efficiency must .* > 0 and <= 1")
            for each in NO_EFFICIENCIES
        ),
        *((most_workers, (each, 0.8), None) for each in (-0.1, math.nan)),
        *((least_period, (1e6, 4, *each), None) for each in ((0.0, 1.0), (1e6, 0.0))),
    ],
)
def test_numbers_that_no_training_has_are_refused(lemma: Any, arguments: Any, words: Any) -> None:
    with pytest.raises(ConfigError, match=words):
        lemma(*arguments)


@every_row(
    ("1 Gbit/s", 125e6, 0.0),
    ("100 Mbit/s, 1 ms", 12.5e6, 1e-3),
    ("10Gbps", 1.25e9, 0.0),
    ("8 kb/s, 20 µs", 1e3, 20e-6),
    ("125 MB/s", 125e6, 0.0),
    ("1.5e3 MiB/s", 1.5e3 * 2**20, 0.0),
    ("12 bytes/s , 2s", 12.0, 2.0),
    (5_000_000, 5e6, 0.0),
    (Link(7.0, 0.5), 7.0, 0.5),
)
def test_a_small_b_is_a_bit_and_a_large_one_a_byte(
    written: Any, bandwidth: float, latency: float
) -> None:
    link = Link.parse(written)
    assert (link.bandwidth, link.latency) == pytest.approx((bandwidth, latency))


def test_a_link_is_written_so_that_it_can_be_read_again() -> None:
    for written in ("1 Gbit/s", "12.5 Mbit/s, 0.25 ms", "3 kbit/s", "7 bit/s"):
        assert Link.parse(str(Link.parse(written))) == Link.parse(written)


@every(
    ("written", "message"),
    [
        *(
            (written, "carries nothing")
            for written in ("0 Gbit/s", 0, -1.0, float("nan"), float("inf"), "1e400 B/s")
        ),
        *(
            (written, "cannot be read: write a link as '1 Gbit/s'")
            for written in ("1 Gbit", "1 gbit/s", "-1 Mbit/s", "1 Gbit/s,", "1 Gbit/s, 5", "")
        ),
        *((written, "is no link") for written in (True, None, 10**400, ["1 Gbit/s"])),
    ],
)
def test_what_carries_nothing_or_cannot_be_read_is_refused(written: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Link.parse(written)


def test_a_negative_latency_is_refused() -> None:
    with pytest.raises(ConfigError, match="latency is -1 s"):
        Link(1e6, -1.0)
