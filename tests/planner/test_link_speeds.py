"""A link says what it means in bytes and seconds, or is refused in words."""

from __future__ import annotations

from typing import Any

import pytest
from every_row import every

from sparkdl.errors import ConfigError
from sparkdl.planner.links import Link


@every(
    ("written", "bandwidth", "latency"),
    [
        ("1 Gbit/s", 125e6, 0.0),
        ("100 Mbit/s, 1 ms", 12.5e6, 1e-3),
        ("10Gbps", 1.25e9, 0.0),
        ("8 kb/s, 20 µs", 1e3, 20e-6),
        ("125 MB/s", 125e6, 0.0),
        ("1.5e3 MiB/s", 1.5e3 * 2**20, 0.0),
        ("12 bytes/s , 2s", 12.0, 2.0),
        (5_000_000, 5e6, 0.0),
        (Link(7.0, 0.5), 7.0, 0.5),
    ],
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
        ("0 Gbit/s", "carries nothing"),
        (0, "carries nothing"),
        (-1.0, "carries nothing"),
        (float("nan"), "carries nothing"),
        (float("inf"), "carries nothing"),
        ("1e400 B/s", "carries nothing"),
        ("1 Gbit", "cannot be read: write a link as '1 Gbit/s'"),
        ("1 gbit/s", "cannot be read"),
        ("-1 Mbit/s", "cannot be read"),
        ("1 Gbit/s,", "cannot be read"),
        ("1 Gbit/s, 5", "cannot be read"),
        ("", "cannot be read"),
        (True, "is no link"),
        (None, "is no link"),
        (10**400, "is no link"),
        (["1 Gbit/s"], "is no link"),
    ],
)
def test_what_carries_nothing_or_cannot_be_read_is_refused(written: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Link.parse(written)


def test_a_negative_latency_is_refused() -> None:
    with pytest.raises(ConfigError, match="latency is -1 s"):
        Link(1e6, -1.0)
