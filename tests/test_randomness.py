"""The driver's use of torch's random numbers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from sparkdl.randomness import borrowed_random_numbers

DEADLINE_S = 10.0


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
            threading.Event().wait(0.05)  # long enough for the other to seed the stream anew
            return torch.cat([*drawn, torch.rand(3)])

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(draw, (1, 2))
    assert torch.equal(one, draws_one_by_one(1))
    assert torch.equal(other, draws_one_by_one(2))


def draws_one_by_one(seed: int) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.cat([torch.rand(1), torch.rand(3)])
