"""Random numbers: the driver's use of torch's, and all that a worker's process draws from.

A process has one stream of each kind, for all its threads.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

_LOCK = threading.RLock()


def seed_worker(seed: int) -> None:
    """Begin the streams of this process: torch's on every device, numpy's and Python's own."""
    with _LOCK:  # ranks may be threads, one of which still builds its model
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)


@contextmanager
def streams_put_back() -> Iterator[None]:
    """Leave the streams of this process, but for GPUs' own, where they were before."""
    cpu = torch.device("cpu")
    states = random_state(cpu)
    try:
        yield
    finally:
        set_random_state(states, cpu)


@contextmanager
def borrowed_random_numbers(seed: int | None = None) -> Iterator[None]:
    """Let a user's code draw, and leave the caller's random state as it was.

    One of our threads at a time; a thread of somebody else's may still draw in between. What has
    to be the same for the same seed is drawn by ``initial.drawn_apart``.

    Args:
        seed: where the streams begin; None to go on from where they are.
    """
    with _LOCK, streams_put_back():
        if seed is not None:
            seed_worker(seed)
        yield


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Where the streams of this process are, by name, for ``set_random_state``.

    Args:
        device: whose stream is the process's too.
    """
    of_numpy: dict[str, Any] = np.random.get_state(legacy=False)  # type: ignore[assignment]
    words, position = of_numpy["state"]["key"].tolist(), of_numpy["state"]["pos"]
    _, state, next_gauss = random.getstate()
    states = {
        "random.cpu": torch.get_rng_state(),
        "random.numpy": torch.tensor([*words, position, of_numpy["has_gauss"]]),
        "random.numpy.gauss": torch.tensor(of_numpy["gauss"], dtype=torch.float64),
        "random.python": torch.tensor(state),
        # Made two at a time; none is kept after an even number of them.
        "random.python.gauss": torch.tensor(
            [] if next_gauss is None else [next_gauss], dtype=torch.float64
        ),
    }
    if device.type == "cuda":
        states["random.cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Go on drawing where ``random_state`` was taken.

    Raises:
        KeyError: there are not all of them.
    """
    torch.set_rng_state(states["random.cpu"])
    *words, position, has_gauss = states["random.numpy"].tolist()
    gauss = float(states["random.numpy.gauss"])
    np.random.set_state(("MT19937", np.array(words, np.uint32), position, has_gauss, gauss))
    next_gauss = states["random.python.gauss"].tolist()
    state = tuple(states["random.python"].tolist())
    random.setstate((random.getstate()[0], state, next_gauss[0] if next_gauss else None))
    if device.type == "cuda" and "random.cuda" in states:
        torch.cuda.set_rng_state(states["random.cuda"], device)
