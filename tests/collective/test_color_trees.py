"""Trees in which nobody has children twice add up what everybody has, with the same bits on all."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from sparkdl.collective import Collective
from sparkdl.collective.tree_sum import Place, TreeSum, height_of, place_of, usable_colors

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def places(members: int, colors: int) -> list[list[Place]]:
    """Of each member, by colour."""
    return [
        [place_of(each, color, members=members, colors=colors) for each in range(members)]
        for color in range(colors)
    ]


def test_each_colour_spans_all_members_and_nobody_has_children_twice() -> None:
    for members in range(1, 33):
        for colors in {usable_colors(members, wanted) for wanted in range(1, members + 2)}:
            trees = places(members, colors)
            inner = [member for tree in trees for member in range(members) if tree[member].children]
            assert len(inner) == len(set(inner)), (members, colors)
            for tree in trees:
                (root,) = [member for member in range(members) if tree[member].parent is None]
                found, level, depth = [root], [root], 0
                while level := [child for each in level for child in tree[each].children]:
                    depth += 1
                    assert all(tree[each].depth == depth for each in level)
                    found += level
                assert sorted(found) == list(range(members)), (members, colors)
                assert depth == height_of(members, colors)
                assert all(len(each.children) <= colors for each in tree)
                for member, each in enumerate(tree):
                    assert all(tree[child].parent == member for child in each.children)
                if colors > 1:
                    assert colors ** (depth - 1) < members * (colors - 1) + 1


def test_as_many_trees_are_built_as_were_asked_for_if_they_can_be_and_two_always_can() -> None:
    for members in range(2, 65):
        for wanted in range(1, members + 1):
            if members % wanted == 0:
                assert usable_colors(members, wanted) == wanted
        assert usable_colors(members, 2) == 2
    assert [usable_colors(members, 4) for members in (1, 3, 7, 11, 13, 14)] == [1, 3, 3, 2, 4, 2]


class Counting:
    """A group that counts the bytes that it is given to send."""

    def __init__(self, group: Any) -> None:
        self.rank, self.size, self.recv = group.rank, group.size, group.recv
        self._group, self.sent = group, 0

    def send(self, values: list[Tensor], member: int, tag: int) -> Any:
        self.sent += sum(each.numel() * each.element_size() for each in values)
        return self._group.send(values, member, tag)


def in_threads(members: int, body: Callable[[Any], Any]) -> list[Any]:
    """What a function of a group returns on each of its members, all in this process."""
    store, connected = dist.HashStore(), threading.Barrier(members, timeout=60)

    def member(rank: int) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=60)
        group = dist.ProcessGroupGloo(store, rank, members, options)
        connected.wait()  # nobody leaves while others connect
        return body(Counting(group))

    with ThreadPoolExecutor(members) as pool:
        return list(pool.map(member, range(members)))


def random_values(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
    return (100 * values).to(dtype)


@pytest.mark.nightly_variants(daily=2)
@pytest.mark.parametrize("members", [2, 7, 8, 1, 3, 4, 5, 6, 9, 10, 11, 12, 13, 14, 15, 16])
def test_it_is_the_serial_sum_with_the_same_bits_on_all_and_at_most_twice_the_bytes(
    members: int,
) -> None:
    for colors in (1, 2, 4):
        for numel in (0, 1, 1009):

            def body(group: Any, colors: int = colors, numel: int = numel) -> Any:
                add_up = TreeSum(group, colors, 921)
                found = []
                for dtype in (torch.float32, torch.float64, torch.int64):
                    values = random_values(group.rank(), numel, dtype)
                    before = group.sent
                    add_up(values)
                    assert group.sent - before <= 2 * numel * dtype.itemsize + 8 * colors * colors
                    found.append(values)
                return found

            all_found = in_threads(members, body)
            for kind, dtype in enumerate((torch.float32, torch.float64, torch.int64)):
                sums = [found[kind] for found in all_found]
                given = [random_values(rank, numel, dtype).double() for rank in range(members)]
                serial = np.sum([each.numpy() for each in given], axis=0)
                sizes = np.sum([each.abs().numpy() for each in given], axis=0)
                assert all(torch.equal(each, sums[0]) for each in sums)
                error = np.abs(sums[0].double().numpy() - serial)
                exact = {torch.float32: 1e-6, torch.float64: 1e-14, torch.int64: 0.0}
                assert (error <= exact[dtype] * sizes).all()


def test_half_precision_views_and_numbers_are_added_up_as_well() -> None:
    def body(group: Any) -> Any:
        add_up = TreeSum(group, 2, 10)
        views = torch.arange(12.0).view(3, 4).t()  # not in memory order
        number = torch.tensor(3)
        halves = torch.full((9,), 0.5, dtype=torch.bfloat16)
        return [add_up(each).tolist() for each in (views, number, halves)]

    expected = [(3 * torch.arange(12.0).view(3, 4).t()).tolist(), 9, [1.5] * 9]
    assert in_threads(3, body) == [expected] * 3


def test_the_bits_do_not_depend_on_who_is_slow() -> None:
    def body(group: Any) -> Any:
        add_up, drawn, found = TreeSum(group, 4, 1024), random.Random(group.rank()), []
        for _ in range(4):
            time.sleep(0.05 * drawn.random())
            found.append(add_up(random_values(group.rank(), 3001)))
        return found

    results = [each for found in in_threads(6, body) for each in found]
    assert all(torch.equal(each, results[0]) for each in results)


def test_sums_in_the_background_come_in_the_order_in_which_they_were_begun() -> None:
    def body(group: Any) -> Any:
        background = TreeSum(group, 2, 1024)
        begun = [background.begin(random_values(group.rank(), 100 * n)) for n in range(1, 8)]
        sums = [each.wait() for each in begun]
        background.close()
        return sums

    first, *others = in_threads(3, body)
    for n, each in enumerate(first, start=1):
        serial = sum(random_values(rank, 100 * n).double() for rank in range(3))
        assert torch.allclose(each.double(), serial, rtol=0, atol=1e-3)
        assert all(torch.equal(each, other[n - 1]) for other in others)


@pytest.mark.nightly_variants
@pytest.mark.parametrize("background", [True, False])
def test_a_member_that_is_killed_is_named_by_the_others(background: bool) -> None:
    """By those too that wait for others, in a chain: not all exchange messages with it."""

    def body(collective: Collective, _: Any) -> Any:
        add_up = collective.in_trees(1, 65536)
        for step in range(1000):
            if collective.rank == 1 and step == 20:
                threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
            values = torch.ones(200_000)
            if not background:
                collective.all_reduce(values, add_up)
            else:
                with collective.guarded("the sum of gradients"):
                    add_up.begin(values).wait()
            if step >= 20:
                time.sleep(0.01)

    results = run_ranks(5, body)

    assert results[1] == ("killed", -signal.SIGKILL)
    for rank in (0, 2, 3, 4):
        assert results[rank][0] == "error"
        # On a busy machine those that notice late are named with it.
        who = rf"CollectiveError: .* among 5 workers failed on rank {rank}: .*\brank 1 on .* did"
        assert re.match(who, results[rank][1])
