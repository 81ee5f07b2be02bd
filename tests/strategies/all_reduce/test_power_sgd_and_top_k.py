"""PowerSGD and top-k against torch's hook, linear algebra, numpy and formulas of bytes."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import cloudpickle
import members
import numpy as np
import pytest
import torch
import torch.distributed as dist
import trainings
from every_row import every, every_row
from members import of_all, steps_of
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from toys import classification, cnn, make_job, mlp, relative_error, schema
from trainings import MOMENTUM

from sparkdl.strategies import GradientAllReduce, OneBitAdam, PowerSGD, Run, TopK
from sparkdl.strategies.all_reduce import power_sgd
from sparkdl.strategies.all_reduce.power_sgd import first_right, place_dtype
from sparkdl.testing import run_world

for module in (sys.modules[__name__], members):
    cloudpickle.register_pickle_by_value(module)

job = partial(trainings.job, optimizer=MOMENTUM)


class OfTorch(GradientAllReduce):
    """The same with torch's own hook, which begins with the Q with which ours does."""

    def start(self, run: Run) -> Any:
        settings = self.compression
        assert isinstance(settings, PowerSGD)
        state = GradientAllReduce().start(run)
        of_torch = PowerSGDState(
            None,
            settings.rank,
            start_powerSGD_iter=settings.start_after,
            min_compression_rate=settings.min_compression_rate,
        )
        places = {parameter: place for place, parameter in enumerate(run.replica.trainable())}

        def reduce(state: PowerSGDState, bucket: dist.GradBucket) -> Any:
            index = bucket.index()
            if state.iter >= settings.start_after and index not in state.q_memory_dict:
                shapes = {p: p.reshape(len(p), -1).shape for p in bucket.parameters()}
                rights = {
                    p: first_right(places[p], shape, settings.rank)
                    for p, shape in shapes.items()
                    if settings.compresses(p.shape)
                }
                rows = sum(shapes[p][0] * right.shape[1] for p, right in rights.items())
                state.q_memory_dict[index] = torch.cat([q.flatten() for q in rights.values()])
                state.p_memory_dict[index] = bucket.buffer().new_zeros(rows)
            return powerSGD_hook(state, bucket)

        # DDP looks at annotations, which here are text.
        reduce.__annotations__.clear()
        state.model.register_comm_hook(of_torch, reduce)
        return state


@pytest.mark.parametrize(
    "sizes",
    [pytest.param([120], id="one"), pytest.param([120, 99], id="two", marks=pytest.mark.nightly)],
)
@pytest.mark.parametrize(
    ("model", "settings"),
    [(mlp(36), PowerSGD(1, 2, 1)), (mlp(36), PowerSGD(4, 5, 1)), (cnn(), PowerSGD(2, 3, 1))],
    ids=["first", "fourth", "convolutions"],
)
def test_it_is_what_torchs_hook_computes(
    model: nn.Module, settings: PowerSGD, sizes: list[int]
) -> None:
    """Which compresses vectors too below a rate of 1.

    Minibatches have more rows than factors have columns: what a basis is completed with is anyone's
    choice.
    """
    data = classification(sizes, width=36)
    ranks_as: Any = "threads" if len(sizes) == 1 else "processes"
    given = partial(job, schema=schema(36), epochs=1, batch_size=12, max_failures=0)
    ours, torchs = (
        run_world(given(module, strategy=strategy), data.shards(), ranks_as=ranks_as)
        for module, strategy in (
            (model, GradientAllReduce(compression=settings)),
            (model, OfTorch(compression=settings)),
        )
    )
    whole = run_world(
        job(model, strategy=GradientAllReduce(), schema=schema(36)),
        data.shards(),
        ranks_as=ranks_as,
    )
    assert relative_error(ours.module, torchs.module) < 1e-9
    assert relative_error(ours.module, whole.module) > 1e-3


SHAPES: dict[int, tuple[int, ...]] = dict(
    enumerate([(12, 9), (12,), (6, 2, 3, 3), (30, 4), (2, 2), ()])
)


def gradients(rank: int, step: int, dtype: torch.dtype = torch.float64) -> dict[int, Tensor]:
    generator = np.random.default_rng([rank, step])
    return {
        place: torch.as_tensor(generator.normal(size=shape)).to(dtype)
        for place, shape in SHAPES.items()
    }


@every("world_size", [1, 3])
def test_what_is_agreed_on_and_what_is_left_out_are_what_was_to_be_sent(world_size: int) -> None:
    settings = PowerSGD(2, min_compression_rate=0)
    ranks = of_all(world_size, lambda member: steps_of(member, gradients, settings, 4))
    for step in zip(*ranks, strict=True):
        for asked, agreed, errors in step:
            assert errors.keys() == {0, 2, 3, 4}
            for place, error in errors.items():
                whole = asked[place].reshape(error.shape)
                assert torch.equal(error, whole - agreed[place].reshape(error.shape))
                # To the rounding of one subtraction.
                sent = agreed[place].reshape(error.shape)
                assert float((sent + error - whole).abs().max()) <= 4 * 2**-52
            assert all(torch.equal(agreed[place], step[0][1][place]) for place in SHAPES)


@every("rank", [9, 1000])
def test_a_rank_as_large_as_the_matrix_is_the_mean_of_all_gradients(rank: int) -> None:
    settings = PowerSGD(rank, min_compression_rate=0)
    ranks = of_all(3, lambda member: steps_of(member, gradients, settings, 3))
    for number, step in enumerate(zip(*ranks, strict=True)):
        for place in SHAPES:
            mean = sum(gradients(rank, number)[place] for rank in range(3)) / 3
            torch.testing.assert_close(step[0][1][place], mean, rtol=0, atol=1e-13)


def test_a_vector_and_a_matrix_that_would_hardly_shrink_are_sent_as_they_are() -> None:
    """(n + m) * rank * rate is 2 * 21 for 12 x 9, 48 for 6 x 18 and 68 for 30 x 4."""
    settings = PowerSGD(1, min_compression_rate=2)
    (_, agreed, errors), *_ = of_all(2, lambda member: steps_of(member, gradients, settings, 1))[0]
    assert errors.keys() == {0, 2, 3}
    for place in (1, 4):
        mean = (gradients(0, 0)[place] + gradients(1, 0)[place]) / 2
        assert torch.equal(agreed[place], mean)
    exactly = PowerSGD(1, min_compression_rate=108 / 21)
    assert not exactly.compresses(torch.Size(SHAPES[0]))


def test_gradients_of_zero_are_sent_as_zero_and_what_follows_them_is_sent() -> None:
    def body(member: Any) -> list[Tensor]:
        compressor = PowerSGD(2, min_compression_rate=0).compressor(member, None)
        sent = []
        for gradient in [torch.zeros(12, 9), torch.zeros(12, 9), torch.ones(12, 9)]:
            compressor.average({0: gradient})
            sent.append(gradient)
        return sent

    first, second, third = of_all(2, body)[0]
    assert not first.any()
    assert not second.any()
    assert third.isfinite().all()
    assert third.any()


@every_row(
    # Factors of 12 x 9, 6 x 18, 30 x 4 and 2 x 2, and 13 values as they are.
    (PowerSGD(2, min_compression_rate=0), 2**-7, 4 * 2 * (21 + 24 + 34 + 4) + 2 * 13),
    # Of 108, 12, 108, 1, 120 and 4 entries.
    (TopK(0.2), 0.0, (4 + 4) * (22 + 3 + 22 + 1 + 24 + 1)),
)
def test_half_precision_is_compressed_in_float32_and_keeps_its_errors_so(
    settings: Any, within: float, octets: int
) -> None:
    def body(member: Any) -> tuple[dict[int, Tensor], dict[int, Tensor], int]:
        compressor = settings.compressor(member, None)
        given = gradients(0, 0, torch.bfloat16)
        compressor.average(given)
        return given, compressor.errors, member.octets

    given, errors, sent = of_all(2, body)[0]
    for place, error in errors.items():
        assert given[place].dtype is torch.bfloat16
        assert error.dtype is torch.float32
        whole = gradients(0, 0, torch.bfloat16)[place].float().reshape(error.shape)
        found = given[place].float().reshape(error.shape) + error
        torch.testing.assert_close(found, whole, rtol=0, atol=within)
    assert sent == octets


WHOLE, ENTRIES = 2400 + 40 + 120 + 3, 72 + 2 + 4 + 1
"""Values of a model, and those of its parameters that top-k of 3 % sends."""
SIGNS = sum(-(-values // 8) + 4 for values in (2400, 40, 120, 3))
ADAM = partial(torch.optim.Adam, lr=0.01, betas=(0.8, 0.9))


@every_row(
    (
        PowerSGD(3, start_after=4),
        torch.float32,
        # (n + m) * rank values of the matrix that is compressed, and the others as they are.
        [("all_reduce", 4 * WHOLE)] * 4
        + [("all_reduce", 4 * n) for n in (40 + 120 + 3, 3 * 40, 3 * 60)] * 3,
    ),
    *(
        (
            TopK(0.03, start_after=3),
            dtype,
            [("all_reduce", octets * WHOLE)] * 3
            + [("all_gather", 4 * ENTRIES), ("all_gather", octets * ENTRIES)] * 4,
        )
        for dtype, octets in ((torch.float32, 4), (torch.float64, 8))
    ),
    (
        OneBitAdam(3),
        torch.float32,
        [("all_reduce", 4 * WHOLE)] * 3 + [("all_to_all_single", SIGNS), ("all_gather", SIGNS)] * 4,
    ),
)
def test_each_step_sends_what_the_formula_says(
    sent: list[tuple[str, torch.dtype, int]],
    compression: Any,
    dtype: torch.dtype,
    expected: list[tuple[str, int]],
) -> None:
    sent.clear()
    model = nn.Sequential(nn.Linear(60, 40), nn.Tanh(), nn.Linear(40, 3)).to(dtype)
    given = job(
        model,
        strategy=GradientAllReduce(compression=compression),
        optimizer=ADAM if isinstance(compression, OneBitAdam) else MOMENTUM,
        schema=schema(60, dtype),
        epochs=1,
    )
    run_world(given, classification([4 * 7], width=60).shards())
    assert [(name, octets) for name, _, octets in sent] == expected


# Top-k


single = partial(gradients, dtype=torch.float32)


def by_hand(fraction: float, workers: int, steps: int) -> list[dict[int, np.ndarray]]:
    """What the workers agree on in each step, in numpy, by sorting."""
    errors = [{place: np.zeros(shape, np.float32) for place, shape in SHAPES.items()}] * workers
    agreed = []
    for step in range(steps):
        sums = {place: np.zeros(shape, np.float32) for place, shape in SHAPES.items()}
        for rank in range(workers):
            left = {}
            for place, gradient in single(rank, step).items():
                whole = gradient.numpy() + errors[rank][place]
                count = -(-round(fraction * whole.size * 1000) // 1000)
                least = np.sort(np.abs(whole), axis=None)[-count]
                sent = np.where(np.abs(whole) >= least, whole, np.float32(0))
                left[place] = whole - sent
                sums[place] = sums[place] + sent
            errors = [*errors[:rank], left, *errors[rank + 1 :]]
        agreed.append({place: total / np.float32(workers) for place, total in sums.items()})
    return agreed


@every_row((0.001, None), (0.1, None), (0.1, torch.int64), (0.5, None), (1.0, None))
def test_it_is_the_rule_in_numpy_to_the_bit(
    monkeypatch: pytest.MonkeyPatch, fraction: float, places: torch.dtype | None
) -> None:
    if places is not None:
        monkeypatch.setattr(power_sgd, "place_dtype", lambda entries: places)
    ranks = of_all(3, lambda member: steps_of(member, single, TopK(fraction), 4))
    for number, expected in enumerate(by_hand(fraction, 3, 4)):
        for steps in ranks:
            for place, agreed in steps[number][1].items():
                np.testing.assert_array_equal(agreed.numpy(), expected[place])


@every_row(
    ([], torch.int32),
    ([3, 2**31], torch.int32),
    ([3, 2**31 + 1], torch.int64),
    ([2**31 + 1, 3], torch.int64),
)
def test_places_are_sent_in_numbers_that_reach_the_largest_parameters_end(
    entries: list[int], dtype: torch.dtype
) -> None:
    assert place_dtype(entries) is dtype


# Parameters that take part in some steps only


ROWS = torch.tensor([[3.0, -2.0, 0.5], [2.0, 1.0, -4.0]], dtype=torch.float64)


class UsedEvery(nn.Module):
    """Uses ``now_and_then`` in one of every so many minibatches, with new gradients."""

    def __init__(self, every: int, minibatches: int = 0) -> None:
        super().__init__()
        self.always = nn.Parameter(torch.zeros(1).double())
        self.now_and_then = nn.Parameter(torch.zeros(2, 3).double())
        self.every, self.minibatches = every, minibatches

    def forward(self, features: Tensor) -> Tensor:
        output = self.always + 0.0 * features.sum(1)
        if self.minibatches % self.every == 0:
            used = self.minibatches // self.every
            output = output + (self.now_and_then * ROWS.roll(used, 1) * (1 + used)).sum()
        self.minibatches += 1
        return output


def mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean()


@every_row(
    (torch.optim.SGD, TopK(0.3), TopK(0.3)),
    (torch.optim.SGD, PowerSGD(1, 0, 0), PowerSGD(1, 0, 0)),
    # Of five steps of the warm-up three use the parameter.
    (partial(torch.optim.Adam, betas=(0.7, 0.9)), OneBitAdam(3), OneBitAdam(5)),
)
def test_steps_that_do_not_use_a_parameter_are_none_to_it(
    optimizer: Any, often: Any, seldom: Any
) -> None:
    def trained(every: int, compression: Any) -> Tensor:
        given = make_job(
            UsedEvery(every),
            loss=mean,
            optimizer=partial(optimizer, lr=0.1),
            strategy=GradientAllReduce(compression=compression, find_unused_parameters=True),
        )
        outcome = run_world(given, classification([4 * 8 * every]).shards())
        return outcome.module.get_parameter("now_and_then").detach()

    assert trained(1, often).any()
    torch.testing.assert_close(trained(2, seldom), trained(1, often), rtol=1e-12, atol=1e-12)


def test_a_parameter_that_is_never_used_is_no_error_of_one_bit_adam() -> None:
    given = make_job(
        UsedEvery(1000, minibatches=1),
        loss=mean,
        optimizer=partial(torch.optim.Adam, lr=0.1),
        strategy=GradientAllReduce(compression=OneBitAdam(1), find_unused_parameters=True),
    )
    outcome = run_world(given, classification([4 * 5]).shards())
    assert outcome.module.get_parameter("always").item() == pytest.approx(-0.5, rel=1e-6)
