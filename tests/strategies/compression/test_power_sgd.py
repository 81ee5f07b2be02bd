"""PowerSGD against torch's hook, linear algebra, a formula of bytes, and lost workers."""

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
from every_row import every
from members import of_all, steps_of
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from toys import classification, cnn, mlp, relative_error, schema
from trainings import MOMENTUM

from sparkdl.strategies import GradientAllReduce, PowerSGD, Run
from sparkdl.strategies.compression.power_sgd import first_right
from sparkdl.testing import run_world

for module in (sys.modules[__name__], members):
    cloudpickle.register_pickle_by_value(module)

STRATEGY = GradientAllReduce(
    compression=PowerSGD(1, start_after=3, min_compression_rate=0), commit_every=4
)


job = partial(trainings.job, strategy=STRATEGY, optimizer=MOMENTUM)


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


SHAPES: dict[int, tuple[int, ...]] = {0: (12, 9), 1: (12,), 2: (6, 2, 3, 3), 5: (30, 4), 6: (2, 2)}


def gradients(rank: int, step: int, dtype: torch.dtype = torch.float64) -> dict[int, Tensor]:
    generator = np.random.default_rng([rank, step])
    return {
        place: torch.from_numpy(generator.normal(size=shape)).to(dtype)
        for place, shape in SHAPES.items()
    }


@every("world_size", [1, 3])
def test_what_is_agreed_on_and_what_is_left_out_are_what_was_to_be_sent(world_size: int) -> None:
    settings = PowerSGD(2, min_compression_rate=0)
    ranks = of_all(world_size, lambda member: steps_of(member, gradients, settings, 4))
    for step in zip(*ranks, strict=True):
        for asked, agreed, errors in step:
            assert errors.keys() == {0, 2, 5, 6}
            for place, error in errors.items():
                whole = asked[place].reshape(error.shape)
                assert torch.equal(error, whole - agreed[place].reshape(error.shape))
                # To the rounding of one subtraction.
                sent = agreed[place].reshape(error.shape)
                assert float((sent + error - whole).abs().max()) <= 4 * 2**-52
            assert all(torch.equal(agreed[place], step[0][1][place]) for place in SHAPES)


def test_what_the_workers_leave_out_together_is_what_their_mean_lacks() -> None:
    ranks = of_all(
        3, lambda member: steps_of(member, gradients, PowerSGD(1, min_compression_rate=0), 3)
    )
    for step in zip(*ranks, strict=True):
        for place in (0, 2, 5):
            mean = sum(asked[place] for asked, _, _ in step) / 3
            left_out = sum(errors[place] for _, _, errors in step) / 3
            lacks = (mean - step[0][1][place]).reshape(left_out.shape)
            torch.testing.assert_close(left_out, lacks, rtol=0, atol=1e-14)


def test_the_mean_of_factors_are_the_factors_of_the_mean() -> None:
    """So the sum over all workers is as well compressed as one worker's."""
    settings, steps, workers = PowerSGD(2, min_compression_rate=0), 4, 3
    together = of_all(workers, lambda member: steps_of(member, gradients, settings, steps))[0]

    def of_means(member: Any) -> list[dict[int, Tensor]]:
        compressor, agreed = settings.compressor(member, None), []
        for step in range(steps):
            everyones = [gradients(rank, step) for rank in range(workers)]
            means = {place: sum(one[place] for one in everyones) / workers for place in SHAPES}
            compressor.average(means)
            agreed.append(means)
        return agreed

    for (_, agreed, _), expected in zip(together, of_all(1, of_means)[0], strict=True):
        for place in SHAPES:
            torch.testing.assert_close(agreed[place], expected[place], rtol=0, atol=1e-12)


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
    assert errors.keys() == {0, 2, 5}
    for place in (1, 6):
        mean = (gradients(0, 0)[place] + gradients(1, 0)[place]) / 2
        assert torch.equal(agreed[place], mean)
    exactly = PowerSGD(1, min_compression_rate=108 / 21)
    assert not exactly.compresses(torch.Size(SHAPES[0]))


def test_the_same_matrix_in_each_step_is_sent_as_its_best_approximation_in_the_end() -> None:
    """The power iteration goes on from step to step; Eckart and Young have what it comes to."""
    matrix, rank = gradients(0, 0)[0], 3

    def body(member: Any) -> Tensor:
        compressor = PowerSGD(rank, min_compression_rate=0).compressor(member, None)
        for _ in range(400):
            given = matrix.clone()
            compressor.average({0: given})
            compressor.errors.clear()
        return given

    left, values, right = np.linalg.svd(matrix.numpy())
    best = left[:, :rank] * values[:rank] @ right[:rank]
    np.testing.assert_allclose(of_all(1, body)[0].numpy(), best, atol=1e-9)


def test_a_matrix_of_the_rank_is_sent_without_loss_in_the_first_step() -> None:
    generator = np.random.default_rng(0)
    matrix = torch.from_numpy(generator.normal(size=(12, 2)) @ generator.normal(size=(2, 9)))

    def body(member: Any) -> Tensor:
        given = matrix.clone()
        PowerSGD(2, min_compression_rate=0).compressor(member, None).average({0: given})
        return given

    torch.testing.assert_close(of_all(1, body)[0], matrix, rtol=0, atol=1e-13)


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


def test_half_precision_is_compressed_in_float32() -> None:
    def body(member: Any) -> tuple[dict[int, Tensor], dict[int, Tensor], int]:
        compressor = PowerSGD(2, min_compression_rate=0).compressor(member, None)
        given = gradients(0, 0, torch.bfloat16)
        compressor.average(given)
        return given, compressor.errors, member.octets

    given, errors, octets = of_all(2, body)[0]
    for place, error in errors.items():
        assert given[place].dtype is torch.bfloat16
        assert error.dtype is torch.float32
        whole = gradients(0, 0, torch.bfloat16)[place].float().reshape(error.shape)
        sent = given[place].float().reshape(error.shape)
        torch.testing.assert_close(sent + error, whole, rtol=0, atol=2**-7)
    factors = sum((n + m) * 2 for n, m in [(12, 9), (6, 18), (30, 4), (2, 2)])
    assert octets == 4 * factors + 2 * 12


def test_each_step_sends_what_the_formula_says(sent: list[tuple[str, torch.dtype, int]]) -> None:
    """(n + m) * rank values for each matrix that is compressed, and the others as they are."""
    model = nn.Sequential(nn.Linear(60, 40), nn.Tanh(), nn.Linear(40, 3))
    steps, compression = 9, PowerSGD(3, start_after=4)
    given = job(
        model,
        strategy=GradientAllReduce(compression=compression),
        schema=schema(60, torch.float32),
        epochs=1,
    )
    run_world(given, classification([4 * steps], width=60, dtype=np.float32).shards())
    whole = 4 * sum(parameter.numel() for parameter in model.parameters())
    rest, lefts, rights = 4 * (40 + 40 * 3 + 3), 4 * 3 * 40, 4 * 3 * 60
    assert [octets for *_, octets in sent] == [whole] * 4 + [rest, lefts, rights] * 5
