"""Training a head on a frozen backbone costs the bytes of the head, and gives what torch gives."""

from __future__ import annotations

import multiprocessing
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from every_row import every, every_row
from torch import Tensor, nn
from toys import Data, classification, make_job, relative_error, sgd_on_union
from trainings import head, on_backbone

from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.checkpoint.storage import CheckpointStore
from sparkdl.errors import ConfigError, ModelError, WorkerError
from sparkdl.events import WindowReport
from sparkdl.strategies import GradientAllReduce, ParameterAveraging, Strategy
from sparkdl.testing import run_world

cloudpickle.register_pickle_by_value(sys.modules[__name__])

MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
TRAINED = (6 * 3 + 3) * 8
"""Bytes of a head in float64; its momentum has as many."""


@every_row(
    (ParameterAveraging(period=2), 8, 8),
    # A quarter of float64, but for the center at the end.
    (ParameterAveraging(period=2, wire_dtype="bfloat16"), 2, 1 + 4),
    (ParameterAveraging(period=2, aggregation="hierarchical"), 4, 4),
    (ParameterAveraging(period=2, aggregation="executors"), 1, 0),
    (GradientAllReduce(), 1, 0),
    (GradientAllReduce(commit_every=1), 4, 0),
)
def test_rounds_and_copies_have_the_bytes_of_what_is_trained(
    traffic: Counter[str], strategy: Strategy, received: int, sent: int
) -> None:
    traffic.clear()
    job = make_job(on_backbone(), strategy=strategy, optimizer=MOMENTUM)
    run_world(
        job, classification([16] * 4).shards(), ranks_as="processes", hosts=["a", "b", "a", "b"]
    )
    # Parameters and momentum in a round; parameters alone for each worker that begins.
    assert traffic["in"] == TRAINED * 2 * received
    assert traffic["out"] == TRAINED * (4 + 2 * sent)


STRATEGIES: list[Strategy] = [
    ParameterAveraging(period=1),
    ParameterAveraging(period=1, aggregation="hierarchical"),
    ParameterAveraging(period=1, aggregation="executors"),
    GradientAllReduce(),
]


@every("strategy", STRATEGIES)
def test_it_equals_sgd_in_one_process_and_the_backbone_keeps_its_bits(strategy: Strategy) -> None:
    data = classification([13, 8, 4])
    job = make_job(on_backbone(), strategy=strategy, epochs=3)

    outcome = run_world(job, data.shards(), ranks_as="processes", hosts=["a", "b", "a"])

    oracle = sgd_on_union(on_backbone(), data, epochs=3)
    assert relative_error(outcome.module, oracle) <= 1e-6
    assert not torch.equal(outcome.module[4].weight, head().weight)
    assert_same_backbone(outcome.module)
    assert [p.requires_grad for p in outcome.module.parameters()] == [False] * 4 + [True] * 2


def assert_same_backbone(module: nn.Module) -> None:
    state = module.state_dict()
    assert all(torch.equal(state[key], now) for key, now in on_backbone()[:4].state_dict().items())


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, tied to the layer that comes after it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer = nn.Linear(6, 6).double().requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, 6, dtype=torch.float64))
        self.up = nn.Parameter(torch.zeros(6, 2, dtype=torch.float64))
        self.again = nn.Linear(6, 6).double().requires_grad_(False)
        self.again.weight = self.layer.weight
        self.head = nn.Linear(6, 3).double()
        self.steps = nn.Parameter(torch.arange(4), requires_grad=False)

    def forward(self, features: Tensor) -> Tensor:
        features = torch.tanh(self.layer(features) + features @ self.down.T @ self.up.T)
        outputs: Tensor = self.head(torch.tanh(self.again(features)))
        return outputs


def test_low_rank_adapters_beside_tied_frozen_layers_equal_sgd_in_one_process() -> None:
    data = classification([13, 8])

    outcome = run_world(make_job(Adapted(), epochs=3), data.shards())

    oracle = sgd_on_union(Adapted(), data, epochs=3)
    assert relative_error(outcome.module, oracle) <= 1e-10
    assert outcome.module.again.weight is outcome.module.layer.weight


def test_values_drawn_by_a_function_under_the_seed_are_the_same_everywhere() -> None:
    """In threads, which have one stream of random numbers for all."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 300).requires_grad_(False), nn.Linear(300, 3)).double()

    data = classification([6, 6, 6, 6])
    first, second = (run_world(make_job(build), data.shards()).module for _ in range(2))
    assert torch.equal(first[0].weight, second[0].weight)


def elsewhere() -> bool:
    return multiprocessing.current_process().name == "rank 1"


def with_another_value() -> nn.Module:
    """As when the function given as model reads a file that is another one on a host."""
    module = on_backbone()
    with torch.no_grad():
        module[0].bias[7] += 1e-12 if elsewhere() else 0
    return module


def with_another_layer() -> nn.Module:
    module = on_backbone()
    module[0].bias.requires_grad_(elsewhere())
    return module


@every("build", [with_another_value, with_another_layer])
def test_a_worker_with_another_backbone_ends_the_run_before_it_trains(build: Any) -> None:
    windows: list[object] = []
    words = r"rank 1 on \S+ built the model with different frozen param"
    with pytest.raises(ModelError, match=words):
        run_world(
            make_job(build, max_failures=3),
            classification([8, 8]).shards(),
            ranks_as="processes",
            on_event=windows.append,
        )
    assert not any(isinstance(event, WindowReport) for event in windows)


class Thaws(nn.Module):
    """Does something to its backbone in its third minibatch."""

    def __init__(self, deed: Callable[[nn.Parameter], object]) -> None:
        super().__init__()
        self.layers = on_backbone()
        self.deed = deed
        self.passes = 0

    def forward(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.layers(features)
        self.passes += 1
        if self.passes == 3:
            self.deed(self.layers[0].weight)
        return outputs


def unfreeze(parameter: nn.Parameter) -> None:
    parameter.requires_grad_(True)


def move(parameter: nn.Parameter) -> None:
    parameter.detach().mul_(0.99)


def move_unseen(parameter: nn.Parameter) -> None:
    parameter.data.mul_(0.99)


@every_row(
    (unfreeze, 3, "'layers.0.weight' required no gradient when the model was built, but does"),
    (move, 3, "'layers.0.weight' required no gradient .* its values have changed"),
    (move_unseen, 4, "'layers.0.weight' required no gradient .* its values have changed"),
)
def test_a_backbone_that_begins_to_change_is_an_error_before_its_epoch_counts(
    tmp_path: Path, deed: Callable[[nn.Parameter], None], step: int, words: str
) -> None:
    """One that leaves no trace at the end of the epoch, which becomes no checkpoint."""
    job, data = make_job(Thaws(deed), epochs=2), classification([16, 16])
    with pytest.raises(WorkerError, match=rf"rank [01], epoch 1, step {step}: .*{words}"):
        run_world(job, data.shards(), checkpoints=CheckpointPolicy(path=str(tmp_path / "c")))
    assert not list(tmp_path.glob("c/checkpoint-*"))


def sizes_below(path: Path) -> dict[str, int]:
    """Bytes of what the newest checkpoint holds, by name."""
    saved = CheckpointStore(str(path), keep_last=1).newest()
    assert saved is not None
    return {name: piece.size for name, piece in saved.contents.items()}


@every("averaged", [True, False])
def test_a_checkpoint_has_the_size_of_one_of_the_head_alone(tmp_path: Path, averaged: bool) -> None:
    strategy = ParameterAveraging(2, average_optimizer_state=averaged)
    data = classification([8, 8])
    for name, model in (("frozen", on_backbone()), ("alone", head())):
        run_world(
            make_job(model, optimizer=MOMENTUM, strategy=strategy),
            data.shards(),
            checkpoints=CheckpointPolicy(path=str(tmp_path / name)),
        )
    sizes = sizes_below(tmp_path / "frozen")
    assert sizes == sizes_below(tmp_path / "alone")
    center = sum(size for name, size in sizes.items() if name.startswith("center."))
    assert center == TRAINED * (2 if averaged else 1)


def half_trained(path: Path, model: nn.Module, data: Data) -> None:
    policy = CheckpointPolicy(path=str(path))
    run_world(make_job(model, optimizer=MOMENTUM), data.shards(), checkpoints=policy)


def nudged(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        module[0].weight[3, 3] = torch.nextafter(module[0].weight[3, 3], torch.tensor(9.0).double())
    return module


@every_row(
    (lambda: nudged(on_backbone()), r"was 3906 values \(.*\), is now 3906 values \("),
    (lambda: on_backbone().requires_grad_(True), r"was 3906 values \(.*\), is now none"),
)
def test_a_checkpoint_is_not_continued_on_another_backbone(
    tmp_path: Path, other: Callable[[], nn.Module], words: str
) -> None:
    data, policy = classification([8, 8]), CheckpointPolicy(path=str(tmp_path / "c"))
    half_trained(tmp_path / "c", on_backbone(), data)
    for epochs in (1, 2):
        job = make_job(other(), optimizer=MOMENTUM, epochs=epochs)
        with pytest.raises(ConfigError, match=rf"frozen parameters: {words}"):
            run_world(job, data.shards(), checkpoints=policy)
