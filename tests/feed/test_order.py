"""Permutations, and how many rows each minibatch has."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import permutation

from sparkdl.feed.order import EpochOrder, even_sizes


@given(rows=st.integers(0, 300), seed=st.integers(-(2**63), 2**63 - 1), epoch=st.integers(1, 999))
def test_a_permutation_holds_every_index_once(rows: int, seed: int, epoch: int) -> None:
    order = EpochOrder(seed, epoch, 2).of_block(rows, rows, None, ())
    assert torch.equal(order, permutation(rows, seed=seed, epoch=epoch, rank=2))
    assert order.dtype is torch.int64
    assert sorted(order.tolist()) == list(range(rows))


def test_permutations_differ_by_seed_epoch_and_rank() -> None:
    orders = {
        tuple(permutation(40, seed=seed, epoch=epoch, rank=rank).tolist())
        for seed in range(6)
        for epoch in range(1, 7)
        for rank in range(6)
    }
    assert len(orders) == 6**3


@given(rows=st.lists(st.integers(0, 50), min_size=1, max_size=5), steps=st.integers(1, 20))
def test_even_sizes_of_several_workers_are_those_of_each(rows: list[int], steps: int) -> None:
    together = np.array([even_sizes(np.array(rows), step, steps) for step in range(steps)])
    alone = [[even_sizes(count, step, steps) for count in rows] for step in range(steps)]
    assert together.tolist() == alone
    assert together.sum(axis=0).tolist() == rows
