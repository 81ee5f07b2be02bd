"""When hosts are slow: in spells, independently of each other, as in the noise of ``cutoff.py``.

A spell lasts 20 usual windows on average, and the time between two spells 60, both exponentially
distributed; during a spell, everything that the host does takes four times as long.
"""

from bisect import bisect_right

import numpy as np

SPELL, BETWEEN, SLOWNESS = 20, 60, 4.0


class Spells:
    """The spells of some hosts, drawn from a seed.

    Args:
        hosts: the number of hosts.
        seed: determines the spells; the same for contenders that are compared.
        window_s: seconds of a usual window.
        until_s: seconds until which spells are drawn.
    """

    def __init__(self, hosts: int, seed: int, window_s: float, until_s: float = 3600.0) -> None:
        draw = np.random.default_rng(seed)
        self._first: list[bool] = []
        self._changes: list[list[float]] = []
        for _ in range(hosts):
            slow = bool(draw.random() < SPELL / (SPELL + BETWEEN))
            self._first.append(slow)
            changes, now = [0.0], 0.0
            while now < until_s:
                now += float(draw.exponential((SPELL if slow else BETWEEN) * window_s))
                changes.append(now)
                slow = not slow
            self._changes.append(changes)

    def is_slow(self, host: int, now: float) -> bool:
        """Whether a host is slow at some time, in seconds."""
        return self._first[host] == bool(self._place(host, now) % 2)

    def done(self, host: int, begins: float, work_s: float) -> float:
        """When work is done that would take ``work_s`` seconds on a host that is not slow."""
        now = begins
        while True:
            pace = SLOWNESS if self.is_slow(host, now) else 1.0
            changes, place = self._changes[host], self._place(host, now)
            ends = changes[place] if place < len(changes) else float("inf")
            if now + work_s * pace <= ends:
                return now + work_s * pace
            work_s -= (ends - now) / pace
            now = ends

    def _place(self, host: int, now: float) -> int:
        return bisect_right(self._changes[host], now)
