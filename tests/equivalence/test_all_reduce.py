"""All-reduced gradients: what is sent, BatchNorm over all workers, sums along trees."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
import toys
from every_row import every, every_row
from interruptions import same_bits
from test_union_batch import OPTIMIZERS, SMALL, at_the_gate, trained
from torch import Tensor, nn
from toys import batches_by_hand, classification, cnn, mlp, relative_error, schema, sgd_on_union

from sparkdl.errors import ConfigError, WorkerError
from sparkdl.strategies import (
    AdaScale,
    GradientAllReduce,
    KFACPreconditioner,
    ParameterAveraging,
    PowerSGD,
    Strategy,
)
from sparkdl.strategies.worker_group import require_no_gpu

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.mark.parametrize(
    ("strategy", "error"),
    [
        (GradientAllReduce(), 1e-10),
        (ParameterAveraging(period=1), 1e-10),
        at_the_gate(GradientAllReduce(shard_optimizer=True), 1e-10),
        at_the_gate(GradientAllReduce(compression="bf16"), 3e-2),
        at_the_gate(GradientAllReduce(compression=PowerSGD(100, 0, 0)), 1e-9),
        at_the_gate(ParameterAveraging(period=1, aggregation="executors"), 1e-10),
    ],
)
def test_channels_last_changes_no_result_and_stays(strategy: Strategy, error: float) -> None:
    data = classification([9, 14], width=36)
    model = cnn().to(memory_format=torch.channels_last)

    outcome = trained(data, model, strategy, schema=schema(36), epochs=2)

    oracle = sgd_on_union(cnn(), data, epochs=2)
    assert relative_error(outcome.module, oracle) <= error
    strides = [parameter.stride() for parameter in outcome.module.parameters()]
    assert strides == [parameter.stride() for parameter in model.parameters()]


@every("sizes", [[8, 16], [0, 8]])
def test_batch_norm_statistics_are_averaged_by_examples(sizes: list[int]) -> None:
    torch.manual_seed(5)
    norm = nn.BatchNorm1d(6, momentum=None, affine=False).double()
    model = nn.Sequential(norm, nn.Linear(6, 3).double())
    data = classification(sizes)

    outcome = trained(data, model, GradientAllReduce(), epochs=1)

    of_steps = [[x.mean(axis=0) for x, _ in batches_by_hand(data, rank, 1, 4)] for rank in (0, 1)]
    means = [np.mean(steps, axis=0) if steps else np.zeros(6) for steps in of_steps]
    expected = np.average(means, axis=0, weights=sizes)
    found = outcome.module.get_buffer("0.running_mean").numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    counted = outcome.module.get_buffer("0.num_batches_tracked")
    assert counted == 2  # the steps of the first worker with rows
    assert counted.dtype is torch.int64


FINDS_UNUSED = GradientAllReduce(find_unused_parameters=True, commit_every=1)


class HalfUsed(nn.Module):
    """Has a layer that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.used = nn.Linear(6, 3)
        self.unused = nn.Linear(6, 3)
        self.double()

    def forward(self, features: Tensor) -> Tensor:
        return self.used(features)


@every_row(([9, 6], "momentum"), ([0, 13], "adam"))
def test_parameters_outside_the_loss_keep_their_values(sizes: list[int], name: str) -> None:
    module = as_one_process(HalfUsed(), sizes, name)
    assert torch.equal(module.unused.weight, HalfUsed().unused.weight)


def as_one_process(model: nn.Module, sizes: list[int], name: str) -> nn.Module:
    """What it is trained to, which is what one process would have come to."""
    data = classification(sizes)
    outcome = trained(data, model, FINDS_UNUSED, optimizer=OPTIMIZERS[name], epochs=2)
    oracle = sgd_on_union(model, data, OPTIMIZERS[name], epochs=2)
    assert relative_error(outcome.module, oracle) <= 1e-10
    return outcome.module


def test_a_parameter_outside_the_last_loss_of_all_is_named_with_the_setting() -> None:
    named = r"step 1: .*\('unused.weight', 'unused.bias'\).* find_unused_parameters=True"
    with pytest.raises(WorkerError, match=named):
        trained(classification([4, 4]), HalfUsed(), GradientAllReduce(), epochs=1)


class UsedLater(HalfUsed):
    """Its second layer takes part from the third minibatch on."""

    minibatches = 0

    def forward(self, features: Tensor) -> Tensor:
        self.minibatches += 1
        late = self.unused(features) if self.minibatches > 2 else 0.0
        return self.used(features) + late


@every("name", ["momentum", "adam"])
def test_a_first_gradient_that_comes_late_is_the_first_to_the_optimizer(name: str) -> None:
    as_one_process(UsedLater(), [12, 12], name)


@every("accumulate", [1, 2])
def test_workers_of_sparse_gradients_may_have_unequal_numbers_of_steps(accumulate: int) -> None:
    data, strategy = classification([26, 17, 9]), GradientAllReduce(accumulate=accumulate)
    outcome = trained(data, toys.SparseTable(), strategy, epochs=2)
    oracle = sgd_on_union(toys.SparseTable(), data, epochs=2, accumulate=accumulate)
    assert relative_error(outcome.module, oracle) <= 1e-10


# BatchNorm over all workers

TOGETHER = GradientAllReduce(sync_batch_norm=True)


def flat_network() -> nn.Module:
    """Two layers of normalization, the second without parameters and without running statistics."""
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(6, 8, bias=False),
        nn.BatchNorm1d(8),
        nn.Tanh(),
        nn.Linear(8, 5, bias=False),
        nn.BatchNorm1d(5, affine=False, track_running_stats=False),
        nn.Linear(5, 3),
    ).double()


def image_network() -> nn.Module:
    """Images of 6 x 6; the running statistics are means over all steps."""
    torch.manual_seed(6)
    return nn.Sequential(
        nn.Unflatten(1, (1, 6, 6)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4, momentum=None),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 3),
    ).double()


@every_row((flat_network, 6, [7, 12, 1], "adam"), (image_network, 36, [9, 14], "momentum"))
def test_parameters_and_statistics_are_those_of_one_process(
    build: Any, width: int, sizes: list[int], name: str
) -> None:
    data, optimizer = classification(sizes, width=width), OPTIMIZERS[name]

    outcome = trained(data, build(), TOGETHER, optimizer=optimizer, schema=schema(width), epochs=3)

    oracle = sgd_on_union(build(), data, optimizer, epochs=3)
    assert relative_error(outcome.module, oracle) <= 1e-9


def test_workers_accumulate_different_numbers_of_minibatches() -> None:
    strategy = GradientAllReduce(sync_batch_norm=True, accumulate=3)
    outcome = trained(classification([23, 5]), flat_network(), strategy, epochs=2)
    assert [epoch.examples for epoch in outcome.history] == [28, 28]


class NormAndActivation(nn.BatchNorm1d):
    """As timm's layers are."""

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features).relu()


def activating() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), NormAndActivation(8), nn.Linear(8, 3)).double()


@every_row(
    ([8, 0], flat_network, "rank 1.*no rows left before its first step"),
    ([8, 8], mlp, "Sequential has no BatchNorm layer"),
    ([8, 8], activating, "'1' is a NormAndActivation, which has a forward of its own"),
    ([1], flat_network, "1 value per channel across all workers"),
)
def test_what_cannot_be_normalized_is_refused(sizes: list[int], model: Any, message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        trained(classification(sizes), model(), TOGETHER)


# Sums along trees


@pytest.mark.nightly
@every_row(
    (GradientAllReduce, {"accumulate": 2}),
    (GradientAllReduce, {"shard_optimizer": True}),
    (GradientAllReduce, {"find_unused_parameters": True}),
    (GradientAllReduce, {"measure_noise": True}),
    (GradientAllReduce, {"sync_batch_norm": True}),
    (GradientAllReduce, {"preconditioner": KFACPreconditioner(0.05, 0.95, 2, 3, 0.02)}),
    (AdaScale, {}),
    (ParameterAveraging, {"aggregation": "executors", "period": 3}),
    (ParameterAveraging, {"aggregation": "executors", "average_optimizer_state": False}),
)
def test_whatever_it_is_combined_with_the_training_is_that_of_the_ring(
    kind: Any, settings: dict[str, Any]
) -> None:
    data = classification([24, 15, 18])
    ring, trees = (
        trained(data, flat_network(), kind(**settings, **way), optimizer=OPTIMIZERS["momentum"])
        for way in ({}, {"reduction": SMALL})
    )
    assert relative_error(trees.module, ring.module) <= 1e-9
    assert [row.loss for row in trees.history] == pytest.approx([row.loss for row in ring.history])
    for mine, other in zip(trees.history, ring.history, strict=True):
        assert (mine.measured or {}) == pytest.approx(other.measured or {}, rel=1e-6)


@every("rounding", ["fp16", "bf16"])
def test_rounded_gradients_are_added_up_as_rounded(rounding: Any) -> None:
    """By two workers, whose sums have one order: to the bit."""
    data = classification([12, 12], width=36)
    ways = (GradientAllReduce(compression=rounding, reduction=each) for each in (None, SMALL))
    ring, trees = (trained(data, cnn(), way, schema=schema(36)) for way in ways)
    assert same_bits(trees, ring)


def test_gpus_are_left_to_nccl() -> None:
    replica: Any = SimpleNamespace(device=torch.device("cuda:0"))
    with pytest.raises(ConfigError, match="NCCL has double binary trees of its own"):
        require_no_gpu(SMALL, replica)
    require_no_gpu(None, replica)
