"""K-FAC is the Kronecker product's explicit inverse, on any number of workers and when resumed."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from every_row import every_row
from torch import Tensor, nn
from toys import (
    Data,
    classification,
    cnn,
    make_job,
    mlp,
    relative_error,
    schema,
    union,
    windows_by_hand,
)

from sparkdl.driver import Outcome
from sparkdl.strategies import GradientAllReduce, KFACPreconditioner
from sparkdl.strategies.all_reduce.chain import Step
from sparkdl.strategies.all_reduce.kfac_layers import factored_layers
from sparkdl.strategies.worker_group import Grid
from sparkdl.testing import run_world

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def lines_of(layer: nn.Module, inputs: np.ndarray) -> np.ndarray:
    """What one row gives a layer at each position of its output, with a 1 behind it."""
    if isinstance(layer, nn.Linear):
        return np.append(inputs, 1.0)[None]
    assert isinstance(layer, nn.Conv2d)
    (pad, _), (high, wide) = layer.padding, layer.kernel_size
    padded = np.pad(inputs, ((0, 0), (pad, pad), (pad, pad)))
    return np.array(
        [
            np.append(padded[:, y : y + high, x : x + wide].ravel(), 1.0)
            for y in range(padded.shape[1] - high + 1)
            for x in range(padded.shape[2] - wide + 1)
        ]
    )


def noted(seen: list[Any], layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
    seen.append((inputs[0], output))


def moments_by_hand(
    module: nn.Module, layers: list[Any], features: np.ndarray, targets: np.ndarray
) -> list[list[np.ndarray]]:
    """A and G of each layer, row by row."""
    sums = [[np.zeros(()), np.zeros(())] for _ in layers]
    for row, target in zip(features, targets, strict=True):
        seen: list[tuple[Tensor, Tensor]] = []
        note = partial(noted, seen)
        hooks = [each.register_forward_hook(note) for each in layers]
        loss = nn.functional.cross_entropy(
            module(torch.from_numpy(row[None])), torch.from_numpy(target[None])
        )
        for hook in hooks:
            hook.remove()
        gradients = torch.autograd.grad(loss, [out for _, out in seen])
        for k, (layer, (given, _), gradient) in enumerate(
            zip(layers, seen, gradients, strict=True)
        ):
            a = lines_of(layer, given[0].detach().numpy())
            g = gradient[0].numpy().reshape(layer.weight.shape[0], -1).T
            sums[k][0] = sums[k][0] + a.T @ a / len(features)
            sums[k][1] = sums[k][1] + g.T @ g / len(g) / len(features)
    return sums


def by_hand(module: nn.Module, data: Data, epochs: int, settings: KFACPreconditioner) -> nn.Module:
    """On the union of the workers' minibatches in one process; inverts whole Kronecker products."""
    module.train()
    layers = [each for each in module.modules() if isinstance(each, (nn.Linear, nn.Conv2d))]
    optimizer = SGD(module.parameters())
    factors: list[list[np.ndarray]] = [
        [np.eye(each.weight[0].numel() + 1), np.eye(len(each.weight))] for each in layers
    ]
    inverses: list[np.ndarray] = []
    for step, (_, windows) in enumerate(windows_by_hand(data, epochs)):
        features, targets = union([part for (part,) in windows.values()])
        if step < 100 or step % settings.factors_every == 0:
            for kept, now in zip(
                factors, moments_by_hand(module, layers, features, targets), strict=True
            ):
                for k in range(2):
                    kept[k] = settings.decay * kept[k] + (1 - settings.decay) * now[k]
        every = settings.decompositions_every
        if step % (min(10, every) if step < 100 else every) == 0:
            inverses = [
                np.linalg.inv(np.kron(a, g) + settings.damping * np.eye(len(a) * len(g)))
                for a, g in factors
            ]
        optimizer.zero_grad()
        outputs = module(torch.from_numpy(features))
        nn.functional.cross_entropy(outputs, torch.from_numpy(targets)).backward()
        found, length = [], 0.0
        for layer, inverse in zip(layers, inverses, strict=True):
            weight = layer.weight.grad.numpy().reshape(len(layer.weight), -1)
            gradient = np.column_stack([weight, layer.bias.grad.numpy()])
            flat = gradient.ravel(order="F")
            found.append((inverse @ flat).reshape(gradient.shape, order="F"))
            length += float(np.sum(found[-1] * gradient)) * 0.1**2
        nu = 1.0
        if settings.kl_clip is not None:
            nu = min(1.0, (settings.kl_clip / abs(length)) ** 0.5)
        for layer, values in zip(layers, found, strict=True):
            shape = layer.weight.shape
            layer.weight.grad = torch.from_numpy(nu * values[:, :-1]).reshape(shape)
            layer.bias.grad = torch.from_numpy(nu * values[:, -1])
        optimizer.step()
    return module


def trained(build: Any, data: Data, settings: KFACPreconditioner, epochs: int = 2) -> Outcome:
    ranks = "threads" if len(data.sizes) == 1 else "processes"
    strategy = GradientAllReduce(preconditioner=settings, commit_every=2)
    width = data.features.shape[1]
    job = make_job(
        build(),
        strategy=strategy,
        optimizer=SGD,
        schema=schema(width),
        epochs=epochs,
        max_failures=1,
    )
    return run_world(job, data.shards(), ranks_as=ranks)  # type: ignore[arg-type]


@every_row((mlp, 6, None), (mlp, 6, 0.02), (cnn, 36, 0.02))
def test_gradients_are_multiplied_by_the_inverse_of_the_kronecker_product(
    build: Any, width: int, kl_clip: float | None
) -> None:
    data = classification([14], width=width)
    settings = KFACPreconditioner(0.05, 0.9, 2, 3, kl_clip)
    outcome = trained(build, data, settings)
    assert relative_error(outcome.module, by_hand(build(), data, 2, settings)) < 1e-9


def test_after_a_hundred_steps_it_is_as_often_as_asked_for_and_before_more_often() -> None:
    settings = KFACPreconditioner(0.05, factors_every=3, decompositions_every=40, kl_clip=0.02)
    steps = range(200)
    factors = [step for step in steps if settings.updates_factors(step)]
    assert factors == [*range(100), *range(102, 200, 3)]
    decompositions = [step for step in steps if settings.decomposes(step)]
    assert decompositions == [*range(0, 100, 10), 120, 160]
    data = classification([14])
    outcome = trained(mlp, data, settings, epochs=31)  # of 4 steps
    assert relative_error(outcome.module, by_hand(mlp(), data, 31, settings)) < 1e-9


@pytest.mark.parametrize(
    ("build", "sizes", "fraction"),
    [
        (mlp, (14, 9), 1.0),
        (mlp, (14, 9), 0.5),
        pytest.param(mlp, (14, 9, 9, 5), 0.5, marks=pytest.mark.nightly),
        pytest.param(cnn, (14, 9), 1.0, marks=pytest.mark.nightly),
        pytest.param(cnn, (14, 9), 0.5, marks=pytest.mark.nightly),
    ],
    ids=["COMM-OPT", "MEM-OPT", "HYBRID", "COMM-OPT of a cnn", "MEM-OPT of a cnn"],
)
def test_workers_together_take_the_steps_of_one(
    build: Any, sizes: tuple[int, ...], fraction: float
) -> None:
    data = classification(sizes, width=6 if build is mlp else 36)
    settings = KFACPreconditioner(0.05, 0.95, 2, 3, 0.02, fraction)
    whole = trained(build, data, settings)
    assert relative_error(whole.module, by_hand(build(), data, 2, settings)) < 1e-9


class Group:
    """Rank 0's of a group in which the others have zeros; keeps the sizes of what it sends."""

    def __init__(self, members: tuple[int, ...], sent: list[tuple[int, int]]) -> None:
        self.members, self.world_size, self.rank, self.index = members, len(members), 0, 0
        self.sent = sent

    def within(self, parts: list[tuple[int, ...]]) -> Group:
        return Group(next(part for part in parts if 0 in part), self.sent)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.sent.append((self.world_size, tensor.numel()))
        return tensor


def minibatch(rows: int) -> Any:
    return SimpleNamespace(examples=rows)


@every_row(
    (1.0, [(4, 49 + 7 + 64 + 8 + 81 + 9 + 9 + 3)], []),
    (0.5, [(2, 49 + 7 + 64 + 8)], [(2, 56 + 27)]),  # rank 0 has the first layer
    (0.25, [], [(4, 56 + 27)]),
)
def test_what_is_sent_is_what_the_papers_say(
    fraction: float, decomposition: list[Any], gradient: list[Any]
) -> None:
    sent: list[tuple[int, int]] = []
    module = mlp()
    replica = SimpleNamespace(
        module=module, device=torch.device("cpu"), optimizer=SGD(module.parameters())
    )
    run: Any = SimpleNamespace(
        replica=replica, collective=Group((0, 1, 2, 3), sent), cleanup=ExitStack()
    )
    found = KFACPreconditioner(factors_every=2, decompositions_every=3, fraction=fraction).start(
        run
    )
    factors = [(4, 49 + 64 + 81 + 9)]  # of 6 inputs and a bias to 8, of 8 and a bias to 3
    both = factors + decomposition
    early, later = [both, factors, factors] * 34, [both, [], factors, decomposition, factors]
    early[100:] = [factors, []]  # steps 100 and 101
    for messages in early + later:
        found.before_forward(Step([16], batch=minibatch(4)))
        module(torch.randn(4, 6, dtype=torch.float64)).sum().backward()
        found.after_reduction(Step([16]))
        assert sent == messages + gradient
        sent.clear()


class OfSequences(nn.Module):
    """Linear layers on rows of six vectors: on all of them at once, one by one, or flattened."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 3, bias=False)
        self.way = way
        self.double()

    def forward(self, features: Tensor) -> Tensor:
        rows = features.view(-1, 6, 6)
        if self.way == "one by one":
            hidden = torch.stack([self.first(rows[:, k]) for k in range(6)], 1)
        elif self.way == "flattened":
            hidden = self.first(rows.reshape(-1, 6)).view(-1, 6, 4)
        else:
            hidden = self.first(rows)
        outputs: Tensor = self.last(hidden.tanh()).mean(1)
        return outputs


def test_a_layers_calls_are_positions_as_the_items_of_a_sequence_are() -> None:
    data, settings = classification([14], width=36), KFACPreconditioner(0.05, 0.9, 2, 3, 0.02)
    at_once, one_by_one, flattened = (
        trained(partial(OfSequences, way), data, settings).module
        for way in ("at once", "one by one", "flattened")
    )
    assert relative_error(one_by_one, at_once) < 1e-12
    assert relative_error(flattened, at_once) < 1e-12


def test_rows_have_a_fraction_of_the_workers_that_divides_them() -> None:
    assert Grid.of(6, 1.0).rows == [(0, 1, 2, 3, 4, 5)]
    assert Grid.of(6, 1 / 6).rows == [(0,), (1,), (2,), (3,), (4,), (5,)]
    assert Grid.of(6, 0.5).rows == [(0, 1, 2), (3, 4, 5)]
    assert Grid.of(6, 0.5).columns == [(0, 3), (1, 4), (2, 5)]
    assert Grid.of(6, 0.6).width == 3
    assert Grid.of(7, 0.5).width == 1
    assert Grid.of(2, 0.75).width == 2
    assert Grid.of(1, 0.1).rows == [(0,)]


class Tied(nn.Module):
    """An embedding whose weights are an output layer's, and other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.out = nn.Linear(4, 5)
        self.out.weight = self.embedding.weight
        self.plain = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.grouped = nn.Conv2d(4, 4, 3, groups=2)
        self.same = nn.Conv2d(4, 4, 3, padding="same")
        self.reflecting = nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")
        self.empty = nn.Linear(4, 1)
        self.empty.weight = nn.Parameter(torch.empty(0, 4))
        self.complex = nn.Linear(4, 4, dtype=torch.complex64)
        self.known = nn.Conv2d(4, 4, 3, padding=1, bias=False)


def test_layers_that_it_does_not_know_or_that_share_weights_keep_their_gradients() -> None:
    assert list(factored_layers(Tied())) == ["plain", "known"]


class Aside(nn.Module):
    """Calls one layer by keyword, and uses the weights of another past its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.used = nn.Linear(6, 4).double(), nn.Linear(4, 3).double()

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.called(input=features)
        return nn.functional.linear(hidden, self.used.weight, self.used.bias)


def test_a_layer_that_is_never_called_keeps_its_gradients() -> None:
    torch.manual_seed(0)
    module = Aside()
    replica = SimpleNamespace(
        module=module, device=torch.device("cpu"), optimizer=SGD(module.parameters())
    )
    run: Any = SimpleNamespace(replica=replica, collective=Group((0,), []), cleanup=ExitStack())
    found = KFACPreconditioner().start(run)
    found.before_forward(Step([4], batch=minibatch(4)))
    module(torch.randn(4, 6, dtype=torch.float64)).square().mean().backward()
    before = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    found.after_reduction(Step([4]))
    kept = [torch.equal(p.grad, b) for p, b in zip(module.parameters(), before, strict=True)]
    assert kept == [False, False, True, True]


def test_a_layer_that_the_optimizer_was_not_given_shortens_no_step() -> None:
    def trained(optimizer: Any) -> nn.Module:
        strategy = GradientAllReduce(preconditioner=KFACPreconditioner(kl_clip=1e-5))
        job = make_job(mlp(), strategy=strategy, optimizer=optimizer)
        return run_world(job, classification([14]).shards()).module

    last, zero_rate = (
        trained(lambda parameters: torch.optim.SGD(list(parameters)[2:], lr=0.1)),
        trained(
            lambda parameters: torch.optim.SGD(
                [{"params": parameters[:2], "lr": 0.0}, {"params": parameters[2:]}], lr=0.1
            )
        ),
    )
    assert relative_error(last, zero_rate) < 1e-12


class BesideNorm(nn.Module):
    """What ``mlp`` computes, with a BatchNorm layer that has no part in it."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.norm = mlp(), nn.BatchNorm1d(6).double()

    def forward(self, features: Tensor) -> Tensor:
        return self.mlp(features) + 0.0 * self.norm(features).sum()


@pytest.mark.gate
def test_rows_that_a_worker_runs_for_others_only_are_not_counted() -> None:
    """With synchronized BatchNorm, one whose rows are used up runs the model on earlier ones."""
    data = classification((14, 5))

    def trained(build: Any, *, sync: bool) -> nn.Module:
        settings = KFACPreconditioner(0.05, 0.9, 1, 1, None)
        strategy = GradientAllReduce(preconditioner=settings, sync_batch_norm=sync)
        job = make_job(build(), strategy=strategy, optimizer=SGD)
        return run_world(job, data.shards(), ranks_as="processes").module

    beside: Any = trained(BesideNorm, sync=True)
    assert relative_error(beside.mlp, trained(mlp, sync=False)) < 1e-9
