"""The driver's use of torch's random numbers, and all that a worker draws from."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from sparkdl.process.randomness import (
    borrowed_random_numbers,
    random_state,
    seed_worker,
    set_random_state,
)

DEADLINE_S = 60.0


def draws(seed: int) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.rand(4)


def test_a_seed_gives_its_stream_and_the_callers_goes_on_as_if_nothing_had_been() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        with borrowed_random_numbers(7):
            assert torch.equal(torch.rand(4), draws(7))
        assert torch.equal(torch.rand(4), draws(3))


def test_without_a_seed_the_stream_goes_on_and_is_put_back() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        with borrowed_random_numbers():
            assert torch.equal(torch.rand(4), draws(3))
        assert torch.equal(torch.rand(4), draws(3))


def test_threads_do_not_draw_from_each_others_streams() -> None:
    begun = threading.Barrier(2)

    def draw(seed: int) -> Tensor:
        begun.wait(DEADLINE_S)
        with borrowed_random_numbers(seed):
            drawn = [torch.rand(1)]
            threading.Event().wait(0.05)  # long enough for the other to seed the stream again
            return torch.cat([*drawn, torch.rand(3)])

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(draw, (1, 2))
    assert torch.equal(one, draws_one_by_one(1))
    assert torch.equal(other, draws_one_by_one(2))


def draws_one_by_one(seed: int) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.cat([torch.rand(1), torch.rand(3)])


@pytest.fixture
def _streams_are_put_back() -> Iterator[None]:
    state = random_state(torch.device("cpu"))
    yield
    set_random_state(state, torch.device("cpu"))


def draw_everywhere() -> list[float]:
    drawn = [float(torch.rand(())), np.random.normal(), random.random(), random.gauss(0, 1)]
    return [*drawn, float(torch.randn(())), np.random.random()]


@pytest.mark.usefixtures("_streams_are_put_back")
@pytest.mark.parametrize("before", range(3))
def test_every_stream_goes_on_where_it_was(before: int) -> None:
    """Normal numbers are made two at a time, so one more of them may be waiting."""
    seed_worker(5)
    for _ in range(before):
        draw_everywhere()
    state = random_state(torch.device("cpu"))
    drawn = draw_everywhere()
    seed_worker(6)
    draw_everywhere()
    set_random_state(state, torch.device("cpu"))
    assert draw_everywhere() == drawn


@pytest.mark.usefixtures("_streams_are_put_back")
def test_seeds_of_any_size_give_streams_of_their_own() -> None:
    streams = []
    for seed in (0, 1, 2**32, 2**63 - 1):
        seed_worker(seed)
        streams.append(tuple(draw_everywhere()))
    assert len(set(streams)) == 4
