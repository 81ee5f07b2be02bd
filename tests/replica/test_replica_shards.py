"""A replica's parts: cut as torch cuts, put together again, and stepped as the whole would be."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from every_row import every, every_row
from replicas import replica_of
from toys import mlp

from sparkdl.errors import ConfigError
from sparkdl.large_batches import LAMB, LARS
from sparkdl.replica import Replica
from sparkdl.replica.shards import (
    PIECE_BYTES,
    Part,
    ShardedSegment,
    rows_before,
    state_cut_with_parameters,
)
from sparkdl.replica.strips import Strips

ADAM = partial(torch.optim.Adam, lr=0.1)


@every("rows", [1, 2, 3, 4, 5, 7, 8, 9, 100])
@every("count", [1, 2, 3, 4, 7])
def test_rows_are_those_of_torchs_chunks(rows: int, count: int) -> None:
    chunks = torch.arange(rows).chunk(count)
    expected = [*map(len, chunks), *[0] * (count - len(chunks))]
    starts = [rows_before(rows, rank, count) for rank in range(count + 1)]
    assert [stop - start for start, stop in itertools.pairwise(starts)] == expected


def parts_of(whole: list[torch.Tensor], cut: list[bool], rank: int, count: int) -> list[Part]:
    def rows_of(values: torch.Tensor) -> torch.Tensor:
        return values[slice(*(rows_before(len(values), rank + i, count) for i in (0, 1)))]

    return [
        Part((rows_of(values) if is_cut else values).clone(), values.shape, is_cut)
        for values, is_cut in zip(whole, cut, strict=True)
    ]


@every("count", [1, 2, 3, 5])
@every("stretch", [1, 3, 7, 50])
def test_what_all_have_is_read_in_the_order_of_the_whole_and_written_back_to_each(
    count: int, stretch: int
) -> None:
    torch.manual_seed(1)
    whole = [torch.randn(7, 3), torch.randn(4), torch.randn(()), torch.randn(1, 2)]
    cut = [True, True, False, True]
    flat = torch.cat([each.reshape(-1) for each in whole])
    segments = [
        ShardedSegment(parts_of(whole, cut, rank, count), rank, count) for rank in range(count)
    ]
    sent = [segment.mine() for segment in segments]
    segments[0].receive = lambda rank, numel: next(sent[rank])
    found = torch.empty(len(flat))
    for start in range(0, len(flat), stretch):
        segments[0].read_on(found[start : start + stretch])
    assert torch.equal(found, flat)
    assert all(next(each, None) is None for each in sent[1:])  # each is sent once
    for rank in range(count):
        parts = parts_of([torch.zeros_like(each) for each in whole], cut, rank, count)
        segment = ShardedSegment(parts, rank, count)
        for start in range(0, len(flat), stretch):
            segment.write(start, flat[start : start + stretch])
        for part, expected in zip(parts, parts_of(whole, cut, rank, count), strict=True):
            assert torch.equal(part.local, expected.local)


def test_no_more_than_a_piece_is_sent_at_a_time() -> None:
    values = torch.zeros(3 * PIECE_BYTES // 4 + 5)
    segment = ShardedSegment([Part(values, values.shape, cut=True)], 0, 1)
    assert [each.nbytes for each in segment.mine()] == [PIECE_BYTES] * 3 + [20]


def sharded_replica(rank: int, count: int, optimizer: Any = ADAM) -> Replica:
    replica = replica_of(mlp(), optimizer)
    replica.shard(rank, count)
    return replica


def test_the_state_has_the_layout_of_the_whole_and_a_part_of_its_values() -> None:
    for rank in range(3):
        replica, whole = sharded_replica(rank, 3), replica_of(mlp(), ADAM)
        found = replica.whole_state(with_optimizer=True)
        layout = [(each.dtype, each.numel()) for each in found]
        expected = whole.layout(with_optimizer=True)
        assert layout == [(segment.dtype, segment.numel) for segment in expected]
    sizes = [sum(p.numel() for p in sharded_replica(rank, 3).trainable()) for rank in range(3)]
    assert sum(sizes) == sum(p.numel() for p in mlp().parameters())
    assert all(p.is_meta for p in replica.module.parameters())


@every_row(
    (torch.optim.SGD, set()),
    (partial(torch.optim.SGD, momentum=0.9, nesterov=True), {"momentum_buffer"}),
    (torch.optim.Adam, {"exp_avg", "exp_avg_sq"}),
    (partial(torch.optim.AdamW, amsgrad=True), {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
    (torch.optim.Adagrad, {"sum"}),
    (torch.optim.RMSprop, {"square_avg"}),
    (torch.optim.NAdam, {"exp_avg", "exp_avg_sq"}),
)
def test_state_of_the_parameters_shape_is_cut(optimizer: Any, keys: set[str]) -> None:
    named = list(mlp().named_parameters())
    assert state_cut_with_parameters(partial(optimizer, lr=0.1), named) == keys


def by_size(parameters: Any) -> torch.optim.Optimizer:
    parameters = list(parameters)
    small = [p for p in parameters if p.numel() <= 8]
    large = [p for p in parameters if p.numel() > 8]
    return torch.optim.SGD([{"params": small, "lr": 0.1}, {"params": large, "lr": 0.2}])


@every_row(
    partial(LAMB, lr=0.1),
    partial(LARS, lr=0.1),
    partial(torch.optim.Adafactor, lr=0.1),
    lambda ps: torch.optim.Muon([p for p in ps if p.ndim == 2], lr=0.1),
)
def test_an_optimizer_that_looks_at_whole_parameters_is_refused(optimizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"steps those otherwise than .*SGD or AdamW"):
        state_cut_with_parameters(optimizer, mlp().named_parameters())


def test_groups_by_the_size_of_whole_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match="into other groups than the whole parameters"):
        sharded_replica(0, 4, by_size)


def decayed_by_dimensions(named_parameters: Any) -> torch.optim.Optimizer:
    pairs = list(named_parameters)
    weights, others = ([p for _, p in pairs if (p.ndim > 1) == large] for large in (True, False))
    return torch.optim.AdamW(
        [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    )


BY_VALUE = [
    partial(torch.optim.SGD, lr=0.1),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    partial(torch.optim.Adam, lr=0.1),
    partial(torch.optim.AdamW, lr=0.1, amsgrad=True),
    partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1),
    partial(torch.optim.RMSprop, lr=0.1, momentum=0.5, centered=True),
    partial(torch.optim.NAdam, lr=0.1),
    decayed_by_dimensions,
]


@every("optimizer", BY_VALUE)
def test_strips_are_stepped_like_rows_of_the_whole(optimizer: Any) -> None:
    whole, cut = replica_of(mlp(), optimizer), replica_of(mlp(), optimizer)
    cut.require_strips()
    rows = {each: (1, len(each) - 1) for each in cut.trainable()}
    strips = cut.strips = Strips(rows)
    strips.forget_others()
    numbers = torch.Generator().manual_seed(1)
    for _ in range(3):
        for mine, own in zip(whole.trainable(), cut.trainable(), strict=True):
            mine.grad = torch.randn(mine.shape, generator=numbers, dtype=mine.dtype)
            strips.of[own].grad = mine.grad[1:-1].clone()
        whole.update()
        cut.update()
        found = dict(strips.tensors(cut.optimizer))
        assert found.keys() == set(cut.trainable())
    for mine, own in zip(whole.trainable(), cut.trainable(), strict=True):
        torch.testing.assert_close(own.data[1:-1], mine.data[1:-1], rtol=1e-12, atol=0)
        assert own.data[[0, -1]].isnan().all()
        state, known = cut.optimizer.state[own], whole.optimizer.state[mine]
        assert state.keys() == known.keys()
        for key, value in known.items():
            if value is not None and value.shape == mine.shape:
                torch.testing.assert_close(state[key][1:-1], value[1:-1], rtol=1e-12, atol=0)
            else:
                assert torch.equal(state[key], value)
