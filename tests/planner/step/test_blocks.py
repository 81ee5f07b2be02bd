"""Plans by block, and the knapsack that they solve."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from every_row import every
from hypothesis import given
from hypothesis import strategies as st
from step_networks import CLASSES, KINDS, Convolutions, Residual, Transformer, most_allocated
from torch import Tensor, nn

from sparkdl.errors import ConfigError
from sparkdl.planner.step import layers
from sparkdl.planner.step.block_costs import blocks_of, run_as
from sparkdl.planner.step.blocks import BlockPlan, plan_blocks
from sparkdl.planner.step.knapsack import Constraint, Option, Selection, fastest
from sparkdl.planner.step.memory import as_batch, mean_of_outputs, rows_of, step_memory
from sparkdl.replica import Replica

SGD = partial(torch.optim.SGD, lr=0.1)
ROWS = 32


def planned(kind: str, budget: int, **others: Any) -> BlockPlan:
    build, example = KINDS[kind]
    return plan_blocks(
        build(),
        example,
        batch_size=ROWS,
        budget=budget,
        optimizer=torch.optim.Adam,
        loss=CLASSES,
        **others,
    )


def measured(kind: str, plan: BlockPlan) -> int:
    build, example = KINDS[kind]

    def two_steps() -> None:
        replica = Replica(plan.apply(build()).train(), torch.optim.Adam, CLASSES)
        for _ in range(2):
            replica.step(rows_of(example, ROWS))

    return most_allocated(two_steps)


@pytest.mark.nightly
@every(
    "kind, share, precisions",
    [
        ("convolutions", 2.0, ["float32"]),
        ("convolutions", 0.8, ["float32"]),
        ("convolutions", 0.8, ["float32", "bf16"]),
        ("transformer", 2.0, ["float32"]),
        ("transformer", 0.7, ["float32"]),
        ("transformer", 0.7, ["float32", "bf16"]),
    ],
)
def test_the_memory_of_a_plan_is_within_a_sixth_of_what_is_allocated(
    kind: str, share: float, precisions: Any
) -> None:
    build, example = KINDS[kind]
    keeps = step_memory(build(), example, optimizer=torch.optim.Adam, loss=CLASSES).peak(ROWS)
    plan = planned(kind, int(share * keeps), precisions=precisions)
    assert plan.memory <= share * keeps
    assert plan.memory == pytest.approx(measured(kind, plan), rel=0.15)
    if precisions == ["float32"]:
        kept = [each.name == "keep float32" for each in plan.blocks.values()]
        assert all(kept) == (share > 1)


def test_less_memory_never_takes_less_time_and_all_kept_needs_most() -> None:
    plans = [planned("transformer", 10**9)]
    assert {each.name for each in plans[0].blocks.values()} == {"keep float32"}
    (name, options), *_ = plans[0].options.items()
    keep, recompute = options
    assert name == "layers.layers.0"
    assert recompute.held < keep.held < recompute.held + recompute.working
    assert recompute.seconds >= keep.seconds
    with pytest.raises(ConfigError, match="too small"):
        planned("transformer", plans[0].memory // 20)


class Clock:
    """Virtual seconds, which only the passes of ``Paced`` move."""

    now = 0.0


class Pass(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds
        Clock.now += seconds
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        Clock.now += 2 * context.seconds
        return gradient, None


class Paced(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 64)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(Pass.apply(x, self.seconds))))


@every("share, recomputed", [(2.0, []), (0.85, ["0", "1"]), (0.7, ["0", "1", "2"])])
def test_the_time_of_a_plan_is_that_of_its_steps(
    monkeypatch: pytest.MonkeyPatch, share: float, recomputed: list[str]
) -> None:
    """Passes of 1, 2, 4 and 8 s forward, and of twice that backward, but for the first one's.

    Blocks that hold the same bytes recompute in the order of their seconds.
    """
    monkeypatch.setattr(layers, "perf_counter", lambda: Clock.now)
    model = nn.Sequential(*(Paced(s) for s in (1.0, 2.0, 4.0, 8.0)))
    example = torch.randn(3, 64)
    keeps = step_memory(model, example, optimizer=SGD).peak(400)
    plan = plan_blocks(model, example, batch_size=400, budget=int(share * keeps), optimizer=SGD)
    assert [n for n, each in plan.blocks.items() if each.name != "keep float32"] == recomputed
    replica = Replica(plan.apply(model), SGD, mean_of_outputs)
    before = Clock.now
    replica.step(rows_of(as_batch(example), 10))
    assert (
        plan.seconds == Clock.now - before == 43.0 + sum(model[int(n)].seconds for n in recomputed)
    )


def trained(model: nn.Module, kind: str, steps: int = 3) -> dict[str, Tensor]:
    torch.manual_seed(5)
    replica = Replica(model.train(), SGD, CLASSES)
    for _ in range(steps):
        replica.step(rows_of(KINDS[kind][1], 8))
    return dict(model.state_dict())


@every("kind", ["convolutions", "transformer"])
def test_recomputed_blocks_train_to_the_same_bits(kind: str) -> None:
    """Running means of batch normalization, and dropout, included."""
    model = KINDS[kind][0]()
    other = copy.deepcopy(model)
    names = blocks_of(other)
    assert len(names) > 2
    for name in names:
        run_as(other.get_submodule(name), "recompute float32")
    expected, found = trained(model, kind), trained(other, kind)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@every("way", ["keep bf16", "recompute bf16"])
def test_blocks_in_bf16_return_float32_and_train_as_under_autocast(way: str) -> None:
    block = Residual(4)
    other = copy.deepcopy(block)
    run_as(other, way)
    x = torch.randn(2, 4, 5, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = block(x)
    found = other(x)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected.float())
    expected.sum().backward()
    found.sum().backward()
    for a, b in zip(block.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0.02, atol=0.02)


def test_a_plan_survives_copies_and_pickles_and_is_undone_by_keeping() -> None:
    model = Convolutions(2)
    run_as(model.blocks[1], "recompute float32")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.blocks[1].forward._block is other.blocks[1]
        assert torch.equal(other(torch.ones(2, 3, 4, 4)), model(torch.ones(2, 3, 4, 4)))
        assert other.state_dict().keys() == Convolutions(2).state_dict().keys()
    run_as(model.blocks[1], "keep float32")
    assert "forward" not in vars(model.blocks[1])


def test_the_blocks_are_the_elements_of_the_outermost_lists() -> None:
    nested = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2))
    assert blocks_of(nested) == ["0.0", "0.1", "1"]
    assert blocks_of(Transformer()) == [f"layers.layers.{n}" for n in range(3)]
    assert blocks_of(Convolutions(2)) == ["blocks.0", "blocks.1"]
    assert blocks_of(Residual(2)) == ["first", "norm", "second"]


class InPlace(nn.Module):
    """Its first block changes its input, and the model changes that of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(8, 8)
        self.changes = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8))
        self.is_changed = nn.Sequential(nn.Flatten(), nn.Tanh(), nn.Linear(8, 8))
        self.twice = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.changes(self.start(x))
        y = self.is_changed(x)
        x += 1
        return self.twice(self.twice(x + y))


def test_blocks_that_cannot_be_computed_again_are_kept_or_refused() -> None:
    options = {"batch_size": 4, "budget": 10**9, "optimizer": SGD}
    example = torch.randn(4, 8)
    plan = plan_blocks(InPlace(), example, blocks=["changes", "twice", "start"], **options)
    offered = {name: [each.name for each in found] for name, found in plan.options.items()}
    assert offered == {
        "start": ["keep float32", "recompute float32"],
        "changes": ["keep float32"],
    }
    model = InPlace()
    run_as(model.is_changed, "recompute float32")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(example).sum().backward()
    with pytest.raises(
        ConfigError, match=r"of the blocks \['twice'\] a step calls none exactly on"
    ):
        plan_blocks(InPlace(), example, blocks=["twice"], **options)


def test_two_plans_in_a_row_offer_the_same_bytes() -> None:
    first, second = (planned("convolutions", 10**9).options for _ in range(2))
    for a, b in zip(
        itertools.chain(*first.values()), itertools.chain(*second.values()), strict=True
    ):
        assert (a.name, a.held, a.working) == (b.name, b.held, b.working)


Table = list[list[Option]]


def taken(chosen: tuple[Option, ...], constraint: str) -> int:
    """By the definition, one layer at a time."""
    if constraint == "sum":
        return sum(o.held + o.working for o in chosen)
    if constraint == "max":
        return sum(o.held for o in chosen) + max(o.working for o in chosen)
    return max(sum(o.held for o in chosen[: k + 1]) + o.working for k, o in enumerate(chosen))


def by_brute_force(table: Table, budget: int, constraint: str) -> float | None:
    fits = [
        math.fsum(o.seconds for o in chosen)
        for chosen in itertools.product(*table)
        if taken(chosen, constraint) <= budget
    ]
    return min(fits, default=None)


def tables(layers: int, options: int, largest: int) -> st.SearchStrategy[Table]:
    option = st.builds(
        Option,
        st.just("an option"),
        st.integers(0, 60).map(float),
        st.integers(0, largest),
        st.integers(0, largest),
    )
    return st.lists(st.lists(option, min_size=1, max_size=options), min_size=1, max_size=layers)


def require_equal(table: Table, budget: int, constraint: Constraint, seconds: float | None) -> None:
    if seconds is None:
        with pytest.raises(ConfigError, match="too small"):
            fastest(table, budget, constraint)
        return
    found = fastest(table, budget, constraint)
    chosen = tuple(layer[pick] for layer, pick in zip(table, found.picks, strict=True))
    assert found.seconds == pytest.approx(seconds)
    assert math.fsum(o.seconds for o in chosen) == found.seconds
    assert found.memory == taken(chosen, constraint) <= budget


@given(tables(5, 3, 12), st.integers(0, 90), st.sampled_from(["sum", "max", "order"]))
def test_the_choice_is_that_of_trying_all(table: Table, budget: int, kind: Constraint) -> None:
    require_equal(table, budget, kind, by_brute_force(table, budget, kind))


@given(tables(5, 3, 12), st.sampled_from(["sum", "max", "order"]))
def test_the_error_names_the_smallest_budget_that_is_enough(table: Table, kind: Constraint) -> None:
    least = min(taken(chosen, kind) for chosen in itertools.product(*table))
    with pytest.raises(ConfigError, match=rf"least take {least:,}\."):
        fastest(table, least - 1, kind)
    assert fastest(table, least, kind).memory == least


def test_three_layers_by_hand() -> None:
    """A layer holds 8 bytes and takes 1 s, or holds 1 and needs 8 for the while and takes 2 s.

    If the first one recomputes, 1 + 8 + 8 = 17 bytes are held, and its own 8 come when those of the
    other two are given up; if the last one does, its 8 come on top of 8 + 8 + 1.
    """
    options = [Option("keep", 1.0, 8), Option("recompute", 2.0, 1, 8)]
    assert fastest([options] * 3, 24, "order") == Selection((0, 0, 0), 3.0, 24)
    found = fastest([options] * 3, 23, "order")
    assert (found.seconds, found.memory, found.picks[2]) == (4.0, 17, 0)
    assert fastest([options] * 3, 23, "max").seconds == 5.0  # 8 + 1 + 1 held, 8 for the while
    assert fastest([options] * 3, 23, "max").memory == 18
    assert fastest([options] * 3, 26, "sum") == Selection((0, 0, 0), 3.0, 24)


def test_a_hundred_times_as_many_layers_are_still_exact() -> None:
    """Layers that are all alike have a closed form: as many keep as fit."""
    options = [Option("keep", 1.0, 7), Option("recompute", 1.5, 2)]
    found = fastest([options] * 2000, 2 * 2000 + 5 * 1234 + 3, "sum")
    assert found.seconds == 2000 + 0.5 * (2000 - 1234)
    assert found.memory == 2 * 2000 + 5 * 1234


def test_no_layers_take_nothing() -> None:
    for kind in ("sum", "max", "order"):
        assert fastest([], 0, kind) == Selection((), 0.0, 0)


@every(
    "wrong, said",
    [
        (lambda: planned("transformer", 10**9, precisions=[]), "precisions must be"),
        (lambda: planned("transformer", 10**9, precisions=["fp8"]), "precisions must be"),
        (lambda: planned("transformer", 10**9, blocks=["encoder"]), "no block 'encoder'"),
        (lambda: planned("transformer", 10**9, blocks=[]), "calls none exactly once"),
        (
            lambda: planned("transformer", 10**9).apply(Convolutions(1)),
            r"no block 'layers\.layers\.0'",
        ),
        (lambda: fastest([], 10.5), "a whole number of bytes, got 10.5"),
        (lambda: fastest([], 10, "min"), "constraint must be one of"),
        (lambda: fastest([[Option("a", 1.0, 1)], []], 10), "layer 1 has no options"),
        (lambda: fastest([[Option("a", 1.0, 1)]], -5), "least take 1"),
        (lambda: Option("a", -1.0, 1), "'a' takes -1.0 seconds"),
        (lambda: Option("a", math.nan, 1), "takes nan seconds"),
        (lambda: Option("a", 1.0, -1), "held=-1"),
        (lambda: Option("a", 1.0, 1, 2**50), "working=1125899906842624"),
    ],
)
def test_bad_input_is_said(wrong: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        wrong()
