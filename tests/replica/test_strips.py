"""Strips of parameters: which optimizers may step them, and that the whole state stays in place."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from every_row import every
from torch import nn
from toys import mlp

from sparkdl.replica import Replica
from sparkdl.replica.strips import Strips


def replica_of(optimizer: Any) -> Replica:
    return Replica(mlp(), optimizer, nn.CrossEntropyLoss())


def decayed_by_dimensions(named_parameters: Any) -> torch.optim.Optimizer:
    pairs = list(named_parameters)
    return torch.optim.AdamW(
        [
            {"params": [p for _, p in pairs if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for _, p in pairs if p.ndim < 2], "weight_decay": 0.0},
        ]
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
    whole, cut = replica_of(optimizer), replica_of(optimizer)
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


def test_the_layout_of_the_state_is_that_of_the_whole_before_and_after_steps() -> None:
    replica = replica_of(partial(torch.optim.Adam, lr=0.1))
    replica.count_optimizer_state()
    layout = replica.layout(with_optimizer=True)
    replica.strips = Strips(dict.fromkeys(replica.trainable(), (0, 2)))
    for _ in range(2):
        for strip in replica.strips.of.values():
            strip.grad = torch.ones_like(strip)
        replica.update()
        flat = replica.segments(with_optimizer=True)
        assert replica.layout(with_optimizer=True) == layout
        places = [each.data_ptr() for each in flat]
    assert [each.data_ptr() for each in replica.segments(with_optimizer=True)] == places


@every("limit", [0.5, 100.0])
def test_gradients_are_clipped_by_the_norm_of_all_strips_and_all_others(limit: float) -> None:
    whole, cut = mlp(), mlp()
    first = cut[0].weight
    others = float(first[3:].numel())  # the other worker has rows 3 and up; all gradients are 1
    strips = Strips({first: (0, 3)}, lambda own: own + others)
    for mine, own in zip(whole.parameters(), cut.parameters(), strict=True):
        mine.grad = torch.ones_like(mine)
        strips.of.get(own, own).grad = torch.ones_like(strips.of.get(own, own))
    strips.clip(cut.parameters(), limit)
    nn.utils.clip_grad_norm_(whole.parameters(), limit)
    torch.testing.assert_close(strips.of[first].grad, whole[0].weight.grad[:3])
    torch.testing.assert_close(cut[2].bias.grad, whole[2].bias.grad)
