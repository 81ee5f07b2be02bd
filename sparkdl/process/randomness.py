"""Random numbers: the driver's use of torch's, and every stream a worker's process draws from.

A process has one stream of each kind, shared by all its threads.
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
    """Seed the streams of this process: torch's on every device, numpy's and Python's own."""
    with _LOCK:  # ranks may be threads, one of which may still be building its model
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)


@contextmanager
def streams_put_back() -> Iterator[None]:
    """Restore the streams of this process, except those of GPUs, to where they were before."""
    cpu = torch.device("cpu")
    states = random_state(cpu)
    try:
        yield
    finally:
        set_random_state(states, cpu)


@contextmanager
def borrowed_random_numbers(seed: int | None = None) -> Iterator[None]:
    """Let the user's code draw random numbers, and leave the caller's random state as it was.

    Only one of our threads does so at a time; a thread of the user's own that draws in the same
    instant would change what is drawn here.

    Args:
        seed: seeds the streams; None to go on from where they are.
    """
    with _LOCK, streams_put_back():
        if seed is not None:
            seed_worker(seed)
        yield


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Where the streams of this process are, by name, for ``set_random_state``.

    Args:
        device: the device whose stream is included.
    """
    of_numpy: dict[str, Any] = np.random.get_state(legacy=False)  # type: ignore[assignment]
    words, position = of_numpy["state"]["key"].tolist(), of_numpy["state"]["pos"]
    _, state, next_gauss = random.getstate()
    states = {
        "random.cpu": torch.get_rng_state(),
        "random.numpy": torch.tensor([*words, position, of_numpy["has_gauss"]]),
        "random.numpy.gauss": torch.tensor(of_numpy["gauss"], dtype=torch.float64),
        "random.python": torch.tensor(state),
        # Normal numbers are made two at a time; after an even number of them none is kept.
        "random.python.gauss": torch.tensor(
            [] if next_gauss is None else [next_gauss], dtype=torch.float64
        ),
    }
    if device.type == "cuda":
        states["random.cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Go on drawing from where ``random_state`` was taken.

    Raises:
        KeyError: some of the streams are missing.
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
