"""Arguments that make no sense are refused by name, and a strategy is saved without pickle."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from driver_rows import ASYNCHRONOUS, CUT_OFF, DELAYED, EASGD, OUTER, OUTER_CUT_OFF, PREDICTED
from every_row import every_row
from misbehaving import die_after
from streams import STREAMS
from torch import Tensor, nn
from toys import Rateless, SparseTable, classification, make_job, mlp
from trainings import ADAM, DATA, job

from sparkdl.checkpoint.object_spec import load_object, save_object
from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.errors import ConfigError, TrainingError, WorkerError
from sparkdl.estimator.persistence import EXPECTED
from sparkdl.strategies import (
    ASP,
    BSP,
    PBSP,
    PSSP,
    SSP,
    AdaScale,
    AsynchronousOuterOptimizer,
    AsynchronousSGD,
    ColorTrees,
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
    Softsync,
    Strategy,
    ThresholdGradientSharing,
    TopK,
)
from sparkdl.testing import run_world

NAN, INF = math.nan, math.inf
NO_STEPS = (0, -1, 2.5, "5", None, True)
Refused = tuple[str, tuple[Any, ...], str]
PERIODS = (
    *((), (5,), [(1, 5)], ([1, 5],), ((1, 5, 6),)),
    *(((1, 0),), ((1, True),), ((1, 2.5),)),
    *(((0, 5),), ((2, 5),), ((1, 5), (1, 6)), ((1, 5), (9, 6), (3, 7))),
)


class UsedLater(nn.Module):
    """A layer takes part from the sixth minibatch on."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 3).double(), nn.Linear(6, 3).double()
        self.minibatches = 0

    def forward(self, features: Tensor) -> Tensor:
        self.minibatches += 1
        late = self.unused(features) if self.minibatches > 5 else 0.0
        return self.used(features) + late


# What is called, with which argument, and the words of which each of its values is refused with.
BY_ARGUMENT: dict[Callable[..., Any], list[Refused]] = {
    ParameterAveraging: [
        ("period", NO_STEPS, "period must be a whole number of steps >= 1, got"),
        ("wire_dtype", ("int8",), "one of float32, bfloat16, got 'int8'"),
        ("average_optimizer_state", (1, "yes", None), "must be a bool"),
        ("aggregation", ("everywhere",), "aggregation must be"),
        ("cutoff", (0, -1, 1.5, True, None, "all", "1"), "cutoff must be 'none', .*, got"),
        ("reduction", ("trees",), "reduction must be None or a ColorTrees, got"),
    ],
    OuterOptimizer: [
        ("cutoff", (0, -1, 1.5, True, None, "all", "1"), "cutoff must be 'none', .*, got"),
        (
            "period",
            (*NO_STEPS, *PERIODS),
            "period must be a whole number of steps >= 1, .*pairs.*got",
        ),
        ("outer", (0.9, OuterSGD), r"outer must be a CenterUpdate such as OuterSGD"),
        ("inner_state", ("maintain",), "one of keep, average, reset, got 'maintain'"),
        ("wire_dtype", ("int8",), "wire_dtype must be one of float32, .*, float4, got"),
        ("fragments", (0, 2.5), "fragments must be a whole number >= 1, got"),
        ("overlap", (-1, True), "overlap must be a whole number of steps >= 0, got"),
        ("merge", (1, "0.5"), "merge must be a number >= 0 and < 1, got"),
    ],
    GradientAllReduce: [
        ("bucket_mb", (0, -1, True, "25", NAN), "bucket_mb"),
        ("accumulate", (0, -1, 1.5, True, "2"), "accumulate"),
        ("compression", ("fp8", "powersgd", True, ""), "compression"),
        ("commit_every", (0, -1, 1.5, True, "2"), "commit_every"),
        ("shard_optimizer", (1, None, "yes"), "shard_optimizer"),
        ("find_unused_parameters", (1, None, "yes"), "find_unused_parameters"),
        ("shard_parameters", (1, None, "yes"), "shard_parameters"),
        ("sync_batch_norm", (1, None, "yes"), "sync_batch_norm"),
        ("preconditioner", ("kfac",), "preconditioner must be"),
        ("hybrid", ("classifier.*", 2, True), "hybrid must be None or a Hybrid"),
        ("reduction", ("trees", 4, ColorTrees), "reduction must be None or a Color"),
    ],
    ColorTrees: [
        ("colors", (0, 1.5, True, None), "colors must be a whole number of trees >= 1"),
        ("chunk_kb", (0, -1, True, "1", NAN, INF), "chunk_kb must be a number of KB > 0"),
    ],
    Hybrid: [("layers", ("", 3, None), "layers must be a pattern of names .*, got")],
    AdaScale: [
        ("measure_noise", (False,), "measure_noise"),
        ("decay", (1, -0.1, True, "0.9", NAN), "decay must be"),
    ],
    OneBitAdam: [("start_after", (0, -1, 1.5, True, None), "start_after")],
    PowerSGD: [
        ("rank", (0, 1.5, True), "rank must"),
        ("start_after", (-1, None), "start_after"),
        ("min_compression_rate", (-0.5, NAN, INF, True), "min_compression_rate"),
    ],
    TopK: [
        ("fraction", (0, 1.01, NAN, True, "1 %"), "fraction must"),
        ("start_after", (-1, 1.5), "start_after"),
    ],
    KFACPreconditioner: [
        ("damping", (0, -1, True, "1", NAN, INF), "damping"),
        ("decay", (1, -0.1, None), "decay"),
        ("factors_every", (0, 1.5, True), "factors_every"),
        ("decompositions_every", (0, None), "decompositions_every"),
        ("kl_clip", (0, -1, "1"), "kl_clip"),
        ("fraction", (0, 1.1, NAN), "fraction"),
    ],
    DelayedNesterov: [("buffer", (0, 2.5), "buffer must be a whole number of contributions >= 1")],
    AsynchronousOuterOptimizer: [("outer", (OuterSGD(),), "outer must be a DelayedNesterov")],
    AsynchronousSGD: [
        ("period", (0, 2.5), "period must be a whole number of steps >= 1, got"),
        ("rate", (0, NAN, INF, True), "rate must be a number > 0, got"),
        ("scale_by_staleness", (1,), "scale_by_staleness must be a bool, got 1"),
        ("barrier", ("ssp", SSP), r"barrier must be ASP\(\), .* got"),
    ],
    ElasticAveraging: [
        ("aggregation", ("host",), "aggregation must be one of driver, executors"),
        ("period", (0, True), "period must be a whole number of steps >= 1, got"),
        ("moving_rate", (0.0, 1.1, NAN, True, "0.1"), "or a number > 0 and <= 1, got"),
        ("momentum", (1.0, -0.1, False, NAN), "momentum must be a number >= 0 and < 1, got"),
        ("mode", ("locked",), "synchronous, asynchronous, hogwild, round_robin, got 'locked'"),
    ],
    GossipAveraging: [
        ("period", (0, True), "period"),
        ("mode", ("shout",), "push, pull, push_pull"),
        ("topology", ("star",), "random, ring, exponential"),
    ],
    OuterSGD: [
        (
            "learning_rate",
            (0, -1.0, INF, NAN, "1", True),
            "learning_rate must be a number > 0, got",
        ),
        ("momentum", (1, -0.1, NAN, False), "momentum must be a number >= 0 and < 1, got"),
        ("nesterov", (1,), "nesterov must be a bool, got"),
    ],
    ThresholdGradientSharing: [
        ("threshold", (-1.0, NAN, True), "threshold"),
        ("sparsity", ((0.1, 0.01), (0, 0.1), 0.1), "sparsity"),
        ("clip", (0.5,), "clip"),
        ("shake_every", (0,), "shake_every"),
        ("period", (0,), "period"),
        ("aggregation", ("mesh",), "aggregation"),
        ("commit_every", (5,), "commit_every"),
    ],
}
TOGETHER: dict[Callable[..., Any], list[tuple[dict[str, Any], str]]] = {
    ParameterAveraging: [
        ({"aggregation": "executors", "wire_dtype": "bfloat16"}, "is for aggregation='driver'"),
        *(
            ({"commit_every": 5, **changes}, "commit_every is for .*'executors'")
            for changes in ({}, {"aggregation": "hierarchical"})
        ),
        *(
            (
                {"reduction": ColorTrees(), "aggregation": each},
                f"reduction is for aggregation='executors', not '{each}': drop it",
            )
            for each in ("driver", "hierarchical")
        ),
        *(
            ({"cutoff": 1, **changes}, f"^{named} needs every worker in every round")
            for changes, named in (
                ({"aggregation": "executors"}, "aggregation='executors'"),
                ({"aggregation": "hierarchical"}, "aggregation='hierarchical'"),
                ({"wire_dtype": "bfloat16"}, "wire_dtype='bfloat16'"),
            )
        ),
    ],
    ElasticAveraging: [
        (
            {"mode": "asynchronous", "aggregation": "executors"},
            "mode='asynchronous' is for aggregation='driver'",
        ),
        ({"moving_rate": 1.0, "mode": "asynchronous"}, "< 1 in asynchronous mode, got 1.0"),
        ({"moving_rate": 1, "mode": "round_robin"}, "< 1 in round_robin mode, got 1"),
        ({"moving_rate": 1.5, "mode": "hogwild"}, "> 0 and <= 1, got 1.5"),
    ],
    GradientAllReduce: [
        (
            {"compression": TopK(), "preconditioner": KFACPreconditioner()},
            r"TopK\(\.\.\.\) and a preconditioner",
        ),
        (
            {"compression": OneBitAdam(5), "shard_optimizer": True},
            r"OneBitAdam\(\.\.\.\).*shard_optimizer each has only a part",
        ),
        (
            {"compression": PowerSGD(), "measure_noise": True},
            r"PowerSGD\(\.\.\.\) leaves too little",
        ),
        *(
            (
                {"hybrid": Hybrid("*"), **other},
                f"^{next(iter(other))} {words}.*: drop it, or hybrid",
            )
            for other, words in (
                ({"shard_optimizer": True}, "gives each worker whole parameters"),
                ({"shard_parameters": True}, "gives each worker other rows"),
                ({"compression": "bf16"}, "sends smaller gradients"),
                ({"compression": PowerSGD()}, "sends smaller gradients"),
                ({"preconditioner": KFACPreconditioner()}, "needs the whole gradients of a layer"),
                ({"measure_noise": True}, "needs the whole gradients of each worker's own"),
                ({"find_unused_parameters": True}, "lets some rows leave out layers"),
            )
        ),
        *(
            ({"reduction": ColorTrees(), **other}, f"{words}.*: drop it, or reduction")
            for other, words in (
                ({"hybrid": Hybrid("*")}, "hybrid adds up the gradients of its layers among"),
                ({"shard_parameters": True}, "shard_parameters gives each worker its share"),
                ({"compression": PowerSGD()}, r"PowerSGD\(...\) has messages of its own"),
            )
        ),
        *(
            ({"shard_parameters": True, **other}, f"^{words}.*: drop it, or shard_parameters")
            for other, words in (
                ({"shard_optimizer": True}, "shard_optimizer is part of"),
                ({"compression": "bf16"}, "compression needs the whole gradients"),
                ({"compression": PowerSGD()}, "compression needs the whole gradients"),
                ({"preconditioner": KFACPreconditioner()}, "preconditioner needs the whole"),
                ({"measure_noise": True}, "measure_noise needs the whole"),
                ({"find_unused_parameters": True}, "find_unused_parameters lets workers use"),
            )
        ),
    ],
    Hybrid: [
        *(
            ({"layers": "*", "groups": each}, "^groups must be a whole number")
            for each in (0, 1.5, True, None, "all")
        )
    ],
    AdaScale: [
        ({"hybrid": Hybrid("*")}, "^measure_noise needs the whole"),
        ({"shard_parameters": True}, "^measure_noise needs the whole"),
    ],
    OuterOptimizer: [
        *(
            ({"cutoff": 1, **changes}, f"^{named} needs every worker in every round")
            for changes, named in (
                ({"wire_dtype": "float8"}, "wire_dtype='float8'"),
                ({"fragments": 2}, "fragments, overlap or merge"),
                ({"overlap": 2}, "fragments, overlap or merge"),
            )
        ),
        ({"period": 4, "overlap": 4}, "there are 4 steps between two rounds; .* overlap=4"),
        (
            {"period": 4, "fragments": 3, "overlap": 1},
            "there are 1 steps between two rounds; .* overlap=1",
        ),
        (
            {"period": ((1, 9), (2, 3)), "fragments": 4},
            "there are 0 steps between two rounds; .* overlap=0",
        ),
        ({"fragments": 2, "inner_state": "reset"}, "inner_state='reset' needs blocking rounds"),
        ({"overlap": 2, "inner_state": "average"}, "inner_state='average' needs blocking rounds"),
    ],
    DelayedNesterov: [
        ({"buffer": 2, "learning_rate": 0}, "learning_rate must be .* > 0, got 0"),
        ({"buffer": 2, "learning_rate": NAN}, "learning_rate must be .* > 0, got nan"),
        (
            {"buffer": 2, "learning_rate": 1, "momentum": 1},
            "momentum must be a number >= 0 and < 1, got 1",
        ),
    ],
    AsynchronousOuterOptimizer: [
        (
            {"outer": DelayedNesterov(2), "period": 0},
            "period must be a whole number of steps >= 1, got 0",
        )
    ],
}


# A strategy, what else there is to a run, how many rows each worker has, and what ends it.
Run = tuple[Strategy[Any], dict[str, Any], list[int], type[Exception], str]
RUNS: list[Run] = [
    (
        replace(EASGD, moving_rate=0.9),
        {},
        [8, 8, 8],
        WorkerError,
        r"moving_rate=0.9 is too high for 3 workers.*0.5; .*0.3",
    ),
    (
        replace(EASGD, moving_rate=0.35, mode="hogwild"),
        {},
        [8, 8, 8],
        WorkerError,
        r"too high for 3 workers.* 1 / workers = 0.333333; 0.9",
    ),
    (
        OuterOptimizer(10_000, fragments=sum(p.numel() for p in mlp().parameters()) + 1),
        {},
        [8, 8],
        ConfigError,
        "fragments are too many for the model",
    ),
    (
        GradientAllReduce(compression=PowerSGD(1, start_after=0)),
        {"model": SparseTable()},
        [8],
        WorkerError,
        "sparse=False, or drop compression",
    ),
    (
        GradientAllReduce(reduction=ColorTrees(2)),
        {"model": SparseTable()},
        [8],
        WorkerError,
        r"reduction=ColorTrees\(...\) takes dense gradients",
    ),
    (
        GradientAllReduce(preconditioner=KFACPreconditioner()),
        {"model": nn.Bilinear(2, 2, 3)},
        [8],
        TrainingError,
        "no Linear or Conv2d layer",
    ),
    (AdaScale(), {"optimizer": Rateless}, [8], TrainingError, "Rateless has no learning rate"),
    *(
        (GradientAllReduce(compression=OneBitAdam(12)), changes, [8], WorkerError, words)
        for changes, words in (
            ({"optimizer": partial(torch.optim.SGD, lr=0.1)}, "not of SGD"),
            ({"optimizer": partial(torch.optim.NAdam, lr=0.1)}, "not of NAdam"),
            ({"optimizer": partial(torch.optim.Adam, amsgrad=True)}, "amsgrad=True"),
            ({"optimizer": ADAM, "clip_norm": 1.0}, "clipNorm"),
        )
    ),
    (
        GradientAllReduce(compression=OneBitAdam(3), find_unused_parameters=True),
        {"model": UsedLater(), "optimizer": ADAM},
        [40],
        WorkerError,
        "first gradient after the warm-up of 3 steps",
    ),
]


def accepted(make: Callable[..., Any], arguments: dict[str, Any], words: str) -> list[str]:
    """What is wrong with the refusal of these arguments."""
    name = f"{make.__name__}({arguments})"
    try:
        make(**arguments)
    except ConfigError as error:
        return [] if re.search(words, str(error)) else [f"{name}: {error}"]
    return [f"{name} is not refused"]


def test_arguments_out_of_range_are_refused_by_name_with_what_was_given() -> None:
    wrong = []
    rows = ((make, *row) for make, of_it in BY_ARGUMENT.items() for row in of_it)
    for make, name, values, words in rows:
        for value in values:
            got = f".*{re.escape(repr(value))}" if words.endswith("got") else ""
            wrong += accepted(make, {name: value}, words + got)
    assert not wrong, "\n".join(wrong)


def test_arguments_that_do_not_fit_together_are_refused() -> None:
    rows = ((make, *row) for make, of_it in TOGETHER.items() for row in of_it)
    wrong = [line for row in rows for line in accepted(*row)]
    assert not wrong, "\n".join(wrong)


@every_row(*RUNS)
def test_what_only_a_run_shows_is_refused(
    strategy: Any, changes: dict[str, Any], rows: list[int], kind: type[Exception], words: str
) -> None:
    given = {"model": mlp(), **changes}
    with pytest.raises(kind, match=words):
        run_world(job(strategy=strategy, max_failures=0, **given), classification(rows).shards())


def test_strategies_are_saved_and_loaded_without_trust(tmp_path: Path) -> None:
    expected, barriers = EXPECTED["strategy"], (ASP(), BSP(), SSP(2), PBSP(3), PSSP(3, 2))
    for strategy in (
        *(AsynchronousSGD(3, 0.5, True, barrier) for barrier in (*barriers, Softsync(2))),
        *(CUT_OFF, OUTER_CUT_OFF, PREDICTED, DELAYED),
        OuterOptimizer(((1, 1), (31, 16)), OuterSGD(1, 0.5), "reset", "bfloat16"),
    ):
        saved = save_object(strategy, tmp_path, "strategy")
        assert load_object(saved, tmp_path, "strategy", expected=expected, trust=False) == strategy
        assert list(tmp_path.iterdir()) == []


@every_row(
    (ASYNCHRONOUS, [({"barrier": SSP(2)}, "barrier=ASP()")]),
    (EASGD, [({"moving_rate": 0.25}, "moving_rate=0.2,")]),
    (
        OUTER,
        [
            ({"outer": OuterSGD(0.7, 0.5, nesterov=False)}, "momentum=0.6"),
            ({"period": ((1, 2), (3, 4))}, "period=2"),
            ({"inner_state": "reset"}, "inner_state='keep'"),
        ],
    ),
    (STREAMS[0], [({"fragments": 4}, "fragments=2")]),
)
def test_with_other_settings_a_checkpoint_is_refused(
    tmp_path: Path, strategy: Strategy[Any], changes: list[tuple[dict[str, Any], str]]
) -> None:
    policy = CheckpointPolicy(path=str(tmp_path / "c"), every_rounds=1)
    die_after(4, make_job(mlp(), strategy=strategy), DATA.shards(), policy)
    for change, was in changes:
        other = make_job(mlp(), strategy=replace(strategy, **change))  # type: ignore[type-var]
        words = rf"strategy: was {type(strategy).__name__}\(.*{re.escape(was)}"
        with pytest.raises(ConfigError, match=words):
            run_world(other, DATA.shards(), checkpoints=policy)
