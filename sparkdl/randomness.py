"""The driver's use of torch's random numbers, of which a process has one stream for all threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_LOCK = threading.RLock()


@contextmanager
def borrowed_random_numbers(seed: int | None = None) -> Iterator[None]:
    """Let a user's code draw, and leave the caller's random state as it was.

    One thread at a time: of two fits in one process, each would draw from the other's stream, and
    the same seed would not give the same parameters.

    Args:
        seed: where the stream begins; None to go on from where it is.
    """
    with _LOCK, torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        yield
