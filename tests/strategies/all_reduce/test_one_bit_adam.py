"""1-bit Adam against the paper's rule in numpy, all-reduced Adam, and a formula of bytes."""

from __future__ import annotations

import math
import sys
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
import trainings
from every_row import every, every_row
from interruptions import same_bits
from members import of_all
from torch import Tensor, nn
from toys import classification, mlp, relative_error, windows_by_hand

from sparkdl.strategies import GradientAllReduce, OneBitAdam
from sparkdl.strategies.all_reduce.chain import Step
from sparkdl.strategies.all_reduce.one_bit_adam import chunk_sizes, chunks_of, decode, encode
from sparkdl.testing import run_world

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIZES = [40, 33]
ADAM = partial(torch.optim.Adam, lr=0.01, betas=(0.8, 0.9))
STRATEGY = GradientAllReduce(compression=OneBitAdam(12), commit_every=4)


job = partial(trainings.job, strategy=STRATEGY, optimizer=ADAM, epochs=4)


@every("entries", [1, 7, 8, 9, 64, 100])
@every("workers", [1, 3, 8])
@every("dtype", [torch.float32, torch.float64])
def test_a_message_is_signs_and_a_scale_of_each_chunk(
    entries: int, workers: int, dtype: torch.dtype
) -> None:
    values = torch.from_numpy(np.random.default_rng(entries).normal(size=entries)).to(dtype)
    values[0] = 0
    sizes = chunk_sizes(entries, workers)
    octets = math.ceil(entries / (8 * workers))
    assert sum(sizes) == entries
    message, sent = encode(chunks_of(values, workers), sizes)
    assert message.shape == (workers, 4 + octets)
    assert message.dtype is torch.uint8
    assert torch.equal(decode(message, dtype), sent)
    for chunk, size in enumerate(sizes):
        start = 8 * octets * chunk
        part = values[start : start + size].double().numpy()
        if size:
            scale = np.linalg.norm(part) / math.sqrt(size)
            expected = np.where(part >= 0, scale, -scale)
            np.testing.assert_allclose(sent[chunk, :size].numpy(), expected, rtol=1e-6)


SHAPES = [(5, 7), (3,), (40,)]


def gradients(rank: int, step: int) -> list[np.ndarray]:
    generator = np.random.default_rng([rank, step])
    return [generator.normal(size=shape) for shape in SHAPES]


class ByHand:
    """The paper's algorithm in numpy, of one parameter, with torch's corrections."""

    def __init__(
        self, start: np.ndarray, workers: int, options: dict[str, Any], warm_up: int
    ) -> None:
        size = len(start)
        self.options, self.warm_up, self.workers, self.steps = options, warm_up, workers, 0
        self.x, self.m, self.v = start, np.zeros(size), np.zeros(size)
        self.e, self.server = np.zeros((workers, size)), np.zeros(size)

    def compressed(self, values: np.ndarray) -> np.ndarray:
        width = 8 * math.ceil(len(values) / (8 * self.workers))
        parts = [values[start : start + width] for start in range(0, len(values), width)]
        scales = [float(np.float32(np.linalg.norm(p) / math.sqrt(len(p)))) for p in parts]
        signs = (np.where(part >= 0, 1.0, -1.0) for part in parts)
        return np.concatenate([s * sign for s, sign in zip(scales, signs, strict=True)])

    def step(self, everyones: list[np.ndarray]) -> None:
        self.steps += 1
        (b1, b2), decay = self.options["betas"], self.options["weight_decay"]
        decoupled = self.options["decoupled"]
        everyones = [each + (0.0 if decoupled else decay) * self.x for each in everyones]
        if self.steps <= self.warm_up:
            gradient = np.mean(everyones, axis=0)
            self.m = b1 * self.m + (1 - b1) * gradient
            self.v = b2 * self.v + (1 - b2) * gradient**2
        else:
            total = np.zeros_like(self.x)
            for worker, gradient in enumerate(everyones):
                whole = b1 * self.m + (1 - b1) * gradient + self.e[worker]
                sent = self.compressed(whole)
                self.e[worker] = whole - sent
                total += sent / self.workers
            total += self.server
            self.m = self.compressed(total)
            self.server = total - self.m
        variance = self.v / (1 - b2 ** min(self.steps, self.warm_up))
        if decoupled:
            self.x = self.x * (1 - self.options["lr"] * decay)
        step = self.m / (1 - b1**self.steps) / (np.sqrt(variance) + 1e-8)
        step[variance == 0] = 0.0
        if self.steps > self.warm_up:
            bound = max(1.0, (1 - b1) / math.sqrt(1 - b2))
            step = np.clip(step, -bound, bound)
        self.x = self.x - self.options["lr"] * step


def of_parameters(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> Any:
    return SimpleNamespace(
        optimizer=optimizer,
        trainable=lambda: parameters,
        clip_norm=None,
        optimizer_state=SimpleNamespace(take_over=lambda: None),
    )


@every_row((torch.optim.Adam, 0.0), (torch.optim.Adam, 0.1), (torch.optim.AdamW, 0.1))
def test_it_is_the_papers_rule_in_numpy(kind: type[torch.optim.Adam], decay: float) -> None:
    workers, warm_up, steps = 3, 6, 14
    options: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": decay}

    def body(member: Any) -> tuple[list[Tensor], list[float]]:
        parameters = [nn.Parameter(torch.ones(shape, dtype=torch.float64)) for shape in SHAPES]
        optimizer = kind(parameters, **options)
        compressor = OneBitAdam(warm_up).compressor(member, of_parameters(optimizer, parameters))
        for step in range(steps):
            given = [torch.from_numpy(each) for each in gradients(member.index, step)]
            if step < warm_up:
                given = [member.all_reduce(each) / workers for each in given]
            else:
                compressor.average(dict(enumerate(given)))
            for parameter, gradient in zip(parameters, given, strict=True):
                parameter.grad = gradient
            compressor.after_reduction(Step(()))
            optimizer.step()
        return [p.detach() for p in parameters], [
            float(optimizer.state[p]["step"]) for p in parameters
        ]

    found = of_all(workers, body)
    decoupled = kind is torch.optim.AdamW
    for place, shape in enumerate(SHAPES):
        start = np.ones(math.prod(shape))
        oracle = ByHand(start, workers, {**options, "decoupled": decoupled}, warm_up)
        for step in range(steps):
            oracle.step([gradients(rank, step)[place].ravel() for rank in range(workers)])
        for values, counted in found:
            assert torch.equal(values[place], found[0][0][place])
            np.testing.assert_allclose(values[place].numpy().ravel(), oracle.x, rtol=1e-9)
            assert counted[place] == steps


@every("betas", [(0.9, 0.999), (0.9, 0.9)])
def test_an_entry_with_hardly_any_variance_moves_by_no_more_than_adams_bound(
    betas: tuple[float, float],
) -> None:
    """In the warm-up, half of a chunk's entries have had gradients, and the others 1e-9 of that."""
    rate, steps = 0.01, 3
    bound = max(1.0, (1 - betas[0]) / math.sqrt(1 - betas[1]))

    def body(member: Any) -> list[Tensor]:
        parameters = [nn.Parameter(torch.zeros(16, dtype=torch.float64))]
        optimizer = torch.optim.Adam(parameters, lr=rate, betas=betas)
        compressor = OneBitAdam(1).compressor(member, of_parameters(optimizer, parameters))
        parameters[0].grad = torch.tensor([1.0, 1e-9] * 8, dtype=torch.float64)
        optimizer.step()
        been = [parameters[0].detach().clone()]
        for _ in range(steps):
            parameters[0].grad = torch.ones(16, dtype=torch.float64)
            compressor.average({0: parameters[0].grad})
            compressor.after_reduction(Step(()))
            been.append(parameters[0].detach().clone())
        return been

    for been in of_all(2, body):
        for before, after in pairwise(been[1:]):
            longest = (after - before).abs().max()
            torch.testing.assert_close(longest, torch.tensor(rate * bound).double())


@pytest.mark.parametrize(
    "sizes",
    [pytest.param([40], id="one"), pytest.param(SIZES, id="two", marks=pytest.mark.nightly)],
)
def test_in_the_warm_up_it_is_all_reduced_adam_to_the_bit(sizes: list[int]) -> None:
    shards, ranks_as = classification(sizes).shards(), "threads" if len(sizes) == 1 else "processes"
    adam, warming, compressed = (
        run_world(
            job(strategy=GradientAllReduce(compression=each), epochs=1, max_failures=0),
            shards,
            ranks_as=ranks_as,  # type: ignore[arg-type]
        )
        for each in (None, OneBitAdam(10), OneBitAdam(9))
    )
    assert same_bits(adam, warming)
    assert not same_bits(adam, compressed)


def test_a_training_is_the_rule_in_numpy_and_entries_without_a_gradient_stay() -> None:
    """A feature that is always 0 has a variance of 0, by which no sign may be divided."""
    data, module = classification([40]), mlp()
    data.features[:, 2] = 0.0
    given = job(strategy=GradientAllReduce(compression=OneBitAdam(6)), epochs=2)
    outcome = run_world(given, data.shards())
    options = {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.0, "decoupled": False}
    parameters = list(module.parameters())
    oracles = [ByHand(p.detach().numpy().ravel().copy(), 1, options, 6) for p in parameters]
    for _, windows in windows_by_hand(data, epochs=2):
        ((features, targets),) = windows[0]
        loss = nn.functional.cross_entropy(
            module(torch.from_numpy(features)), torch.from_numpy(targets)
        )
        gradients = torch.autograd.grad(loss, parameters)
        for oracle, parameter, gradient in zip(oracles, parameters, gradients, strict=True):
            oracle.step([gradient.numpy().ravel()])
            parameter.data = torch.from_numpy(oracle.x.reshape(parameter.shape).copy())
    assert relative_error(outcome.module, module) < 1e-9
    assert torch.equal(outcome.module[0].weight[:, 2], mlp()[0].weight[:, 2])
