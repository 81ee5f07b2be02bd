"""On a GPU a feed and a training come to what they come to on the CPU."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import misbehaving
import numpy as np
import pyarrow as pa
import pytest
import torch
from every_row import every, every_row
from interruptions import die_after, policy, same_bits
from misbehaving import Misbehaves, kill
from support.replay import recorded_commits, replay
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC
from toys import (
    classification,
    cnn,
    held_out,
    held_out_schema,
    make_job,
    mlp,
    relative_error,
    schema,
    sgd_on_union,
)

from sparkdl import encodings
from sparkdl.errors import ConfigError, NonFiniteError, TrainingError, WorkerError
from sparkdl.feed.feed import Feed, FeedOptions
from sparkdl.feed.schema import FeedSchema
from sparkdl.large_batches import LAMB, LARS
from sparkdl.metrics import Metrics
from sparkdl.protocols import UNKNOWN, Batch, ColumnSpec, Padding
from sparkdl.strategies import (
    AdaScale,
    AsynchronousOuterOptimizer,
    AsynchronousSGD,
    DelayedNesterov,
    ElasticAveraging,
    GossipAveraging,
    GradientAllReduce,
    Hybrid,
    KFACPreconditioner,
    OneBitAdam,
    OuterOptimizer,
    OuterSGD,
    ParameterAveraging,
    PowerSGD,
    Strategy,
    ThresholdGradientSharing,
    TopK,
)
from sparkdl.testing import _threads, batches_of, run_world

cloudpickle.register_pickle_by_value(misbehaving)
cloudpickle.register_pickle_by_value(sys.modules[__name__])

GPU = "cuda:0"
DATA = classification([22, 17])
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.01)
OUTER = OuterSGD(0.7, 0.5)

IN_STEP: dict[str, Strategy[Any]] = {
    "averaging": ParameterAveraging(2),
    "averaging, bfloat16": ParameterAveraging(2, wire_dtype="bfloat16"),
    "averaging, optimizer kept": ParameterAveraging(2, average_optimizer_state=False),
    "outer": OuterOptimizer(2, OUTER),
    "outer, float8": OuterOptimizer(2, OUTER, wire_dtype="float8"),
    "outer, float4": OuterOptimizer(2, OUTER, wire_dtype="float4"),
    "outer, streamed": OuterOptimizer(4, OUTER, fragments=2, overlap=1, merge=0.5),
    "outer, state averaged": OuterOptimizer(2, OUTER, inner_state="average"),
    "outer, state reset": OuterOptimizer(2, OUTER, inner_state="reset"),
    "elastic": ElasticAveraging(2, 0.3),
    "threshold": ThresholdGradientSharing(1e-2),
    "gossip, symmetric": GossipAveraging(mode="symmetric", topology="ring"),
}
"""Whose two workers exchange through the driver, or by themselves, the same in every run."""
ALONE: dict[str, Strategy[Any]] = {
    "asynchronous": AsynchronousSGD(2),
    "asynchronous, outer": AsynchronousOuterOptimizer(DelayedNesterov(1, 0.7, 0.5), 2),
    "elastic, asynchronous": ElasticAveraging(2, 0.3, mode="asynchronous"),
    "elastic, hogwild": ElasticAveraging(2, 0.3, mode="hogwild"),
    "averaging, cut off": ParameterAveraging(2, average_optimizer_state=False, cutoff=1),
}
"""Whose result depends on who comes first, so that there is one worker."""
COLLECTIVE: dict[str, Strategy[Any]] = {
    "averaging": ParameterAveraging(2, aggregation="executors"),
    "averaging, hierarchical": ParameterAveraging(2, aggregation="hierarchical"),
    "elastic": ElasticAveraging(2, 0.3, aggregation="executors"),
    "threshold": ThresholdGradientSharing(1e-2, aggregation="executors"),
    "all-reduce": GradientAllReduce(),
    "all-reduce, accumulating": GradientAllReduce(accumulate=2),
    "all-reduce, bf16": GradientAllReduce(compression="bf16"),
    "all-reduce, fp16": GradientAllReduce(compression="fp16"),
    "all-reduce, unused": GradientAllReduce(find_unused_parameters=True),
    "all-reduce, sharded": GradientAllReduce(shard_optimizer=True),
    "all-reduce, parameters sharded": GradientAllReduce(shard_parameters=True),
    "all-reduce, hybrid": GradientAllReduce(hybrid=Hybrid("*")),
    "all-reduce, norm": GradientAllReduce(sync_batch_norm=True),
    "all-reduce, noise": GradientAllReduce(measure_noise=True),
    "AdaScale": AdaScale(accumulate=2),
    "PowerSGD": GradientAllReduce(compression=PowerSGD(1, start_after=2)),
    "top k": GradientAllReduce(compression=TopK(0.2)),
    "K-FAC": GradientAllReduce(preconditioner=KFACPreconditioner(0.05)),
}
"""Which need NCCL, of a single rank."""
ROUNDED = {"float8", "float4", "bf16", "fp16", "bfloat16"}


def check(strategy: Strategy[Any], ranks: int, name: str, ranks_as: Any, **changes: Any) -> None:
    """Train on the GPU and on CPUs, and compare the models and the losses."""
    dtype = changes.pop("dtype", torch.float64)
    numbers = np.float32 if dtype == torch.float32 else np.float64
    data = classification([22, 17] if ranks == 2 else [22], dtype=numbers)
    settings: dict[str, Any] = {"strategy": strategy, "optimizer": SGD, "epochs": 3}
    model = changes.pop("model", mlp)().to(dtype)
    job = make_job(model, **{**settings, "schema": schema(6, dtype), **changes})
    on_cpu, on_gpu = (
        run_world(job, data.shards(), ranks_as=ranks_as, devices=[device] * ranks)
        for device in ("cpu", GPU)
    )
    exact = dtype == torch.float64 and not any(each in name for each in ROUNDED)
    bound = 1e-8 if exact else 2e-2
    assert relative_error(on_gpu.module, on_cpu.module) < bound
    assert all(not p.is_cuda for p in on_gpu.module.parameters())
    losses = [[epoch.loss for epoch in outcome.history] for outcome in (on_gpu, on_cpu)]
    assert losses[0] == pytest.approx(losses[1], rel=bound)


KINDS = every(("optimizer", "dtype"), [(SGD, torch.float64), (ADAM, torch.float32)])


@KINDS
@every("name", IN_STEP)
def test_two_replicas_on_it_learn_what_they_learn_on_cpus(
    name: str, optimizer: Any, dtype: torch.dtype
) -> None:
    check(IN_STEP[name], 2, name, "threads", optimizer=optimizer, dtype=dtype)


@KINDS
@every("name", ALONE)
def test_a_replica_that_waits_for_nobody_learns_the_same(
    name: str, optimizer: Any, dtype: torch.dtype
) -> None:
    check(ALONE[name], 1, name, "threads", optimizer=optimizer, dtype=dtype)


def normalized() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(6), mlp())


@pytest.mark.parametrize("name", COLLECTIVE)
@KINDS
def test_with_nccl_a_rank_learns_what_it_learns_with_gloo(
    name: str, optimizer: Any, dtype: torch.dtype
) -> None:
    model = normalized if "norm" in name else mlp
    changes = {"model": model, "optimizer": optimizer, "dtype": dtype, "deadline_s": 90.0}
    check(COLLECTIVE[name], 1, name, "processes", **changes)


def test_one_bit_adam_learns_the_same_with_nccl() -> None:
    strategy = GradientAllReduce(compression=OneBitAdam(4))
    check(strategy, 1, "OneBitAdam", "processes", optimizer=ADAM, deadline_s=90.0)


OPTIMIZERS: dict[str, Any] = {
    "Adam": ADAM,
    "AMSGrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "fused AdamW": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.01),
    "ASGD": partial(torch.optim.ASGD, lr=0.01),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.01),
    "LARS": partial(LARS, lr=0.1),
    "LAMB": partial(LAMB, lr=0.01),
}


@every("name", OPTIMIZERS)
@every("dtype", [torch.float64, torch.float32])
def test_the_state_of_an_optimizer_on_a_gpu_is_averaged(name: str, dtype: torch.dtype) -> None:
    changes = {"optimizer": OPTIMIZERS[name], "dtype": dtype, "clip_norm": 1.0}
    check(ParameterAveraging(2), 2, "", "threads", **changes)


@every_row(
    FeedOptions(exchange_rows=True),
    FeedOptions(reshuffle_every=1),
    FeedOptions(drop_last=True),
)
def test_however_rows_are_fed_it_learns_the_same(options: FeedOptions) -> None:
    check(ParameterAveraging(2), 2, "", "threads", feed=options)


def test_rows_weigh_on_it_what_they_weigh_on_cpus() -> None:
    data = classification([22, 17])
    weights = np.random.default_rng(1).uniform(0.1, 3, 39)
    shards = [
        batches_of(7, features=data.features[a:b], label=data.targets[a:b], weight=weights[a:b])
        for a, b in ((0, 22), (22, 39))
    ]
    columns = replace(schema(), weight=ColumnSpec("weight", torch.float64))
    job = make_job(mlp(), schema=columns, strategy=ParameterAveraging(2), epochs=3)
    on_cpu, on_gpu = (run_world(job, shards, devices=[device] * 2) for device in ("cpu", GPU))
    assert relative_error(on_gpu.module, on_cpu.module) < 1e-8


def test_a_worker_that_is_killed_on_it_comes_back_for_its_rows(tmp_path: Path) -> None:
    job = make_job(
        Misbehaves(tmp_path, kill, after=7),
        optimizer=ADAM,
        strategy=ParameterAveraging(2),
        epochs=3,
        max_failures=1,
        deadline_s=90.0,
    )
    with recorded_commits() as commits:
        outcome = run_world(job, DATA.shards(), ranks_as="processes", devices=[GPU] * 2)
    assert len(list(tmp_path.iterdir())) > 3 * math.ceil(17 / 4)  # a pass was made again
    assert [epoch.examples for epoch in outcome.history] == [39] * 3
    assert relative_error(outcome.module, replay(job, DATA.shards(), commits)) < 1e-8


class Dropping(nn.Module):
    """Draws from the device's stream of random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.drop = mlp(), nn.Dropout(0.4)

    def forward(self, features: Tensor) -> Tensor:
        return self.net(self.drop(features))


@every("windows", [2, 8])
@every("optimizer", [SGD, ADAM])
def test_interrupted_and_resumed_on_a_gpu_it_ends_in_the_same_bits(
    tmp_path: Path, optimizer: Any, windows: int
) -> None:
    data = classification([31])
    job = make_job(Dropping(), strategy=ParameterAveraging(2), optimizer=optimizer, epochs=4)
    whole = run_world(job, data.shards(), devices=[GPU])
    launch = partial(_threads, devices=[GPU])
    assert die_after(job, data, tmp_path / "c", windows, launch, every_rounds=1)
    resumed = run_world(
        job, data.shards(), devices=[GPU], checkpoints=policy(tmp_path / "c", every_rounds=1)
    )
    assert same_bits(resumed, whole)


def test_a_checkpoint_of_a_gpu_is_resumed_on_a_cpu(tmp_path: Path) -> None:
    job = make_job(mlp(), strategy=ParameterAveraging(2), optimizer=ADAM, epochs=4)
    whole = run_world(job, DATA.shards())
    launch = partial(_threads, devices=[GPU] * 2)
    assert die_after(job, DATA, tmp_path / "c", 5, launch, every_rounds=1)
    resumed = run_world(job, DATA.shards(), checkpoints=policy(tmp_path / "c", every_rounds=1))
    assert relative_error(resumed.module, whole.module) < 1e-8


def test_a_convolutional_network_in_bf16_learns_what_one_process_does_to_its_precision() -> None:
    data = classification([90, 70], width=36)
    job = make_job(
        cnn().float(),
        schema=schema(36, torch.float32),
        optimizer=(small := partial(torch.optim.SGD, lr=0.03)),
        strategy=ParameterAveraging(1),
        epochs=2,
        precision="bf16",
    )
    outcome = run_world(job, data.shards(), devices=[GPU] * 2)
    oracle = sgd_on_union(cnn(), data, small, epochs=2)
    assert 1e-4 < relative_error(outcome.module.cpu(), oracle) < 2e-2
    assert all(p.dtype == torch.float32 for p in outcome.module.parameters())


class Poisoned(nn.Module):
    """Its loss is NaN from the third minibatch on."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.passes = mlp(), 0

    def forward(self, features: Tensor) -> Tensor:
        self.passes += 1
        return self.net(features) * (math.nan if self.passes >= 3 else 1.0)


@every_row((ParameterAveraging(1), 3), (GradientAllReduce(), 3))
def test_gradients_that_are_not_finite_end_it_with_rank_and_step(
    strategy: Strategy[Any], step: int
) -> None:
    job = make_job(Poisoned(), strategy=strategy, deadline_s=90.0)
    with pytest.raises(NonFiniteError, match=f"rank 0 has .* step {step}") as caught:
        run_world(job, classification([22]).shards(), ranks_as="processes", devices=[GPU])
    assert (caught.value.rank, caught.value.step) == (0, step)


class TooLarge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, features: Tensor) -> Tensor:
        return self.net(features) + torch.empty(1 << 44, device=features.device)[0]


def test_a_gpu_whose_memory_is_full_is_said_with_what_helps() -> None:
    with pytest.raises(WorkerError, match="The GPU's memory is full: lower batchSize"):
        run_world(make_job(TooLarge()), classification([22]).shards(), devices=[GPU])


def test_two_ranks_on_one_gpu_are_refused_before_nccl_sees_them() -> None:
    job = make_job(mlp(), strategy=GradientAllReduce(), deadline_s=90.0)
    with pytest.raises((ConfigError, TrainingError), match=r"ranks 0 and 1 on .* both use cuda:0"):
        run_world(job, DATA.shards(), ranks_as="processes", devices=[GPU] * 2)


ROWS = 60_000
WIDTH = 64


def numbers() -> tuple[FeedSchema, list[pa.RecordBatch]]:
    generator = np.random.default_rng(1)
    features = generator.normal(size=(ROWS, WIDTH)).astype(np.float32)
    columns = FeedSchema(
        (ColumnSpec("features", torch.float32, (WIDTH,)),), ColumnSpec("label", torch.int64)
    )
    return columns, batches_of(4096, features=features, label=np.arange(ROWS))


def images() -> tuple[FeedSchema, list[pa.RecordBatch]]:
    generator = np.random.default_rng(2)
    octets = [generator.bytes(3 * 16 * 16) for _ in range(ROWS // 10)]
    table = pa.table({"image": pa.array(octets, pa.binary()), "label": np.arange(len(octets))})
    image = ColumnSpec("image", torch.uint8, (3, 16, 16), encodings.BYTES)
    return FeedSchema((image,), ColumnSpec("label", torch.int64)), table.to_batches(500)


def sequences() -> tuple[FeedSchema, list[pa.RecordBatch]]:
    generator = np.random.default_rng(3)
    lengths = generator.integers(0, 90, ROWS // 10)
    values = pa.array(generator.integers(1, 999, lengths.sum()))
    tokens = pa.ListArray.from_arrays(pa.array(np.cumsum([0, *lengths]), pa.int32()), values)
    table = pa.table({"tokens": tokens, "label": np.arange(len(lengths))})
    padded = ColumnSpec("tokens", torch.int64, (UNKNOWN,), padding=Padding(0, "padding_mask"))
    return FeedSchema((padded,), ColumnSpec("label", torch.int64)), table.to_batches(700)


FEEDS = {"numbers": numbers, "images": images, "sequences": sequences}


def checksums(batch: Batch, busy: Callable[[], object]) -> Tensor:
    """Numbers that change with any value and any order, computed behind other work."""
    busy()
    found = []
    for tensor in (*batch.features, batch.targets):
        flat = tensor.reshape(-1).double()
        weights = torch.arange(1, len(flat) + 1, dtype=torch.float64, device=flat.device)
        found.append((flat * weights.remainder(8191)).sum())
    return torch.stack(found)


@every_row(*((kind, False) for kind in FEEDS), ("sequences", True))
def test_every_minibatch_is_the_same_while_the_gpu_is_busy(
    tmp_path: Path, kind: str, grouped: bool
) -> None:
    columns, batches = FEEDS[kind]()
    large = torch.rand(3000, 3000, device="cuda")
    found = {}
    for device in ("cpu", "cuda:0"):
        busy = (lambda: large @ large) if device != "cpu" else (lambda: None)
        with Feed(
            columns,
            batch_size=97,
            seed=5,
            rank=0,
            directory=tmp_path,
            device=device,
            options=FeedOptions(group_by_length=grouped),
        ) as feed:
            feed.fill(batches)
            sums = [checksums(b, busy) for epoch in (1, 2, 3) for b in feed.epoch(epoch)]
        found[device] = torch.stack(sums).cpu()
    assert torch.allclose(found["cpu"], found["cuda:0"], rtol=1e-12)


def test_abandoned_in_the_middle_of_an_epoch_a_feed_goes_on_with_the_next(tmp_path: Path) -> None:
    columns, batches = numbers()
    with Feed(columns, batch_size=97, seed=5, rank=0, directory=tmp_path, device="cuda:0") as feed:
        feed.fill(batches)
        for epoch in range(1, 6):
            for index, _ in enumerate(feed.epoch(epoch)):
                if index == 3 * epoch:
                    break
        ids = torch.cat([batch.targets for batch in feed.epoch(6)])
    assert torch.equal(ids.sort().values.cpu(), torch.arange(ROWS))


def test_validation_and_its_metrics_are_computed_on_it() -> None:
    metrics = Metrics.of(
        {"accuracy": MulticlassAccuracy(3, average="micro"), "auroc": MulticlassAUROC(3)},
        lambda outputs, targets: (outputs.softmax(1), targets),
    )
    job = make_job(
        mlp(),
        schema=held_out_schema(),
        metrics=metrics,
        strategy=ParameterAveraging(2),
        epochs=3,
        loss=nn.CrossEntropyLoss(),
    )
    shards = held_out([240, 150]).shards(60)
    on_cpu, on_gpu = (run_world(job, shards, devices=[d] * 2) for d in ("cpu", "cuda:0"))
    for mine, other in zip(on_gpu.history, on_cpu.history, strict=True):
        assert mine.validation_loss == pytest.approx(other.validation_loss, rel=1e-8)
        assert mine.metrics == pytest.approx(other.metrics, rel=1e-5)
