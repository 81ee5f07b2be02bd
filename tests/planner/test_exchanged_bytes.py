"""What each strategy sends, and what a fit has recorded of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_row import every_row
from hypothesis import given
from hypothesis import strategies as st
from profiles import profile
from torch import nn
from toys import classification, make_job, mlp

from sparkdl.driver import initial_center
from sparkdl.errors import ConfigError
from sparkdl.events import EpochSummary, WindowReport
from sparkdl.planner.profile import Profile
from sparkdl.planner.traffic import Traffic, traffic_of
from sparkdl.protocols import Segment
from sparkdl.report import Recording, Setup, TrainingSummary
from sparkdl.strategies import (
    AsynchronousSGD,
    ColorTrees,
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
from sparkdl.testing import run_world

PAGE = Path(__file__).parents[2] / "docs" / "strategies.md"
ROWS, COLUMNS, RANK, PERIOD = 400, 256, 2, 12
MATRIX = torch.zeros(ROWS, COLUMNS)
P = ROWS * COLUMNS * 4
LAYOUT = (Segment("parameters", torch.float32, ROWS * COLUMNS),)


def of(strategy: Strategy[Any]) -> Traffic:
    traffic = traffic_of(strategy, LAYOUT, [MATRIX])
    assert traffic is not None
    return traffic


def formula(text: str, workers: int, hosts: int) -> float:
    """A formula of the table, with P in bytes, computed by Python."""
    text = re.sub(r" for each .*", "", text)
    text = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", text)
    names = {"P": P, "N": workers, "H": hosts, "p": PERIOD, "r": RANK, "n": ROWS, "m": COLUMNS}
    return float(eval(text, {"__builtins__": {}}, names))


FLOAT4 = OuterOptimizer(PERIOD, OuterSGD(), wire_dtype="float4", fragments=3, overlap=1)
EXAMPLES: dict[int, list[Strategy[Any]]] = {
    0: [GradientAllReduce()],
    1: [GradientAllReduce(compression=PowerSGD(RANK))],
    2: [
        ParameterAveraging(PERIOD, average_optimizer_state=False),
        ElasticAveraging(PERIOD),
        ElasticAveraging(PERIOD, mode="hogwild"),
        OuterOptimizer(PERIOD),
        AsynchronousSGD(PERIOD),
    ],
    3: [ParameterAveraging(PERIOD, aggregation="hierarchical")],
    4: [
        ParameterAveraging(PERIOD, aggregation="executors"),
        ElasticAveraging(PERIOD, aggregation="executors"),
    ],
    5: [FLOAT4],
}
"""Strategies by the row of the page's table."""


def test_each_row_of_the_page_s_table_is_what_its_strategies_send() -> None:
    head = "| | bytes per step | the busiest link is |\n|---|---|---|\n"
    begin = PAGE.read_text().partition(head)[2]
    rows = [line.split(" | ") for line in begin.partition("\n\n")[0].splitlines()]
    assert len(EXAMPLES) == len(rows)
    for (_, bytes_a_step, whose), strategies in zip(rows, EXAMPLES.values(), strict=True):
        for strategy in strategies:
            sent = of(strategy)
            assert (whose == "each worker's |") == (sent.through == "workers")
            for workers, per_host in ((1, 1), (2, 2), (8, 4), (10, 2)):
                says = formula(bytes_a_step, workers, workers // per_host)
                found = sent.bytes_a_step(workers, per_host)
                assert found == pytest.approx(says, rel=3e-3), (strategy, workers)


def test_compressed_gradients_are_smaller_and_small_ones_are_sent_whole() -> None:
    assert of(GradientAllReduce(compression="bf16")).up == P / 2
    assert of(GradientAllReduce(accumulate=4)).period == 4
    tiny = traffic_of(GradientAllReduce(compression=PowerSGD(2)), LAYOUT, [torch.zeros(3, 3)])
    assert tiny.up == 36


@every_row(
    GossipAveraging(),
    ThresholdGradientSharing(),
    ThresholdGradientSharing(aggregation="executors"),
    GradientAllReduce(compression=TopK(0.1)),
    GradientAllReduce(compression=OneBitAdam(10)),
    GradientAllReduce(preconditioner=KFACPreconditioner()),
    GradientAllReduce(hybrid=Hybrid("*")),
    GradientAllReduce(shard_optimizer=True),
    GradientAllReduce(reduction=ColorTrees()),
    ParameterAveraging(1, aggregation="executors", reduction=ColorTrees()),
    OuterOptimizer(((1, 1), (2, 4))),
)
def test_what_depends_on_values_or_a_schedule_has_no_formula(strategy: Strategy[Any]) -> None:
    """Nor what sends more than the gradients: factors, or the parameters that others stepped."""
    assert traffic_of(strategy, LAYOUT, [MATRIX]) is None


def test_gradients_travel_in_as_many_buckets_as_torch_makes_whatever_their_precision() -> None:
    """``bucket_cap_mb`` counts 2**20 bytes of the gradients as they are computed."""
    assert of(GradientAllReduce()).buckets == 1
    tenth = P / 10 / 2**20
    assert of(GradientAllReduce(bucket_mb=tenth)).buckets == 10
    assert of(GradientAllReduce(bucket_mb=tenth, compression="fp16")).buckets == 10


@given(whole=st.floats(0, 10), step_s=st.floats(0, 10), buckets=st.integers(1, 40))
def test_what_is_waited_for_of_an_exchange_tells_all_of_it(
    whole: float, step_s: float, buckets: int
) -> None:
    traffic = Traffic(through="workers", up=1.0, hidden="backward", buckets=buckets)
    shown = traffic.shown(whole, step_s)
    assert whole / buckets <= shown <= whole
    assert traffic.whole(shown, step_s) == pytest.approx(whole, abs=1e-12)


def test_only_plain_averaging_can_be_moved() -> None:
    assert of(ParameterAveraging(5)).places == ("driver", "executors", "hierarchical")
    for strategy in (
        ParameterAveraging(5, wire_dtype="bfloat16"),
        ParameterAveraging(5, cutoff=1),
        ElasticAveraging(5),
        ElasticAveraging(5, aggregation="executors"),
        GradientAllReduce(),
    ):
        assert of(strategy).places == ()


def test_half_precision_is_summed_among_workers_in_float32() -> None:
    layout = (Segment("parameters", torch.bfloat16, 100), Segment("buffers", torch.int64, 1))
    found = traffic_of(ParameterAveraging(5, aggregation="executors"), layout, [])
    assert (found.up, found.state) == (408, 208)


def test_a_strategy_of_ones_own_has_the_bytes_of_its_wire_format() -> None:
    class Own(ParameterAveraging):
        pass

    assert of(Own(7)).up == P
    job = make_job(nn.Linear(6, 3), strategy=Own(2))
    replica = job.replica()
    layout, _ = initial_center(replica, with_optimizer=True)
    found = traffic_of(job.strategy, layout, replica.trainable())
    assert found.up == sum(each.numel * each.dtype.itemsize for each in layout)


DRIVER = Traffic(through="driver", up=100.0, down=100.0, period=5)


def recorded(epochs: int, slow: float = 1.0, period: int = 5, rows: int = 40) -> Recording:
    """Two workers with rows for ten steps; the first epoch takes each of them nine seconds more."""
    setup = Setup(model="Net", strategy="S()", batch_size=4, traffic=DRIVER, aggregation="driver")
    recording = Recording(2, setup)
    recording.hosts = ["a", "b"]
    for epoch in range(1, epochs + 1):
        for rank in (0, 1):
            warm = 9.0 if epoch == 1 else 0.0
            computed = (slow if rank else 1.0) + warm
            recording.seconds[rank] += np.array([0, 0.5, computed - 0.5, 1.0, 0.5, 0])
            report = {"rank": rank, "epoch": epoch, "step": 1, "loss_sum": 0.0, "last": True}
            recording.note(WindowReport(examples=rows, **report))  # type: ignore[arg-type]
        seconds = slow + 1.5 + (9.0 if epoch == 1 else 0.0)
        told = {"loss": 0.0, "examples": 2 * rows, "rounds": 2, "seconds": seconds}
        recording.note(EpochSummary(epoch=epoch, **told))
    return recording


def test_the_first_epoch_is_left_out_if_there_are_others() -> None:
    found = Profile.of(recorded(3))
    assert found.worker_step_s == pytest.approx((0.1, 0.1))
    assert found.round_s == pytest.approx(0.75)
    assert (found.rounds, found.rows, found.epoch_seconds) == (4, 80, (2.5, 2.5))
    cold = Profile.of(recorded(1))
    assert cold.worker_step_s == pytest.approx((1.0, 1.0))
    assert cold.round_s == pytest.approx(0.75)


def test_a_round_is_what_holds_up_the_slowest_worker() -> None:
    found = Profile.of(recorded(3, slow=2.0))
    assert found.worker_step_s == pytest.approx((0.1, 0.2))
    assert found.slowest == pytest.approx(0.2 / 0.15)
    assert found.round_s == pytest.approx(0.75)


def test_an_epoch_that_has_only_begun_changes_nothing() -> None:
    whole, begun = recorded(3), recorded(3)
    for rank in (0, 1):
        begun.seconds[rank] += np.array([0, 0.25, 0.25, 0.5, 0.25, 0])
        report = {"rank": rank, "epoch": 4, "step": 1, "loss_sum": 0.0, "last": False}
        begun.note(WindowReport(examples=20, **report))  # type: ignore[arg-type]
    assert Profile.of(begun) == Profile.of(whole)


def test_epochs_before_a_checkpoint_do_not_count() -> None:
    recording = recorded(3)
    recording.history.insert(0, EpochSummary(epoch=0, loss=0, examples=9, rounds=1, seconds=99.0))
    recording.epochs_before = 1
    assert Profile.of(recording).epoch_seconds == (2.5, 2.5)


def test_a_fit_without_an_epoch_or_a_round_has_no_profile() -> None:
    for recording in (Recording(2), recorded(0), recorded(2, rows=0)):
        with pytest.raises(ConfigError, match="nothing to plan from"):
            Profile.of(recording)


def test_a_training_has_the_profile_of_what_it_did() -> None:
    """Four steps of three rows in each of three epochs, a round after two and at the end."""
    job = make_job(mlp(), strategy=ParameterAveraging(2), batch_size=3, epochs=3)
    outcome = run_world(job, classification([12, 12]).shards())
    found = TrainingSummary(outcome.recording).profile
    assert (found.workers, found.rows, found.batch_size, found.rounds) == (2, 24, 3, 4)
    assert found.model == "Sequential"
    assert found.aggregation == "driver"
    assert min(found.worker_step_s) > 0
    seconds = sum(found.epoch_seconds)
    busy = 8 * max(found.worker_step_s)
    assert found.round_s * found.rounds + busy == pytest.approx(max(seconds, busy))
    plan = TrainingSummary(outcome.recording).plan(link="1 Gbit/s", workers=[1, 2, 4])
    assert plan.predict(4).seconds > 0


def test_summaries_and_profiles_of_several_fits_make_one_plan() -> None:
    def summary(sizes: list[int]) -> TrainingSummary:
        job = make_job(mlp(), strategy=ParameterAveraging(2), batch_size=3, epochs=2)
        return TrainingSummary(run_world(job, classification(sizes).shards()).recording)

    one, two = summary([12]), summary([12, 12])
    assert [each.workers for each in one.plan(two).profiles] == [1, 2]
    assert [each.workers for each in one.plan(two.profile).profiles] == [1, 2]


def test_a_profile_comes_back_from_json_and_from_a_job_s_result() -> None:
    for each in (profile(2), profile(1, traffic=DRIVER, aggregation=None)):
        assert Profile.from_json(each.to_json()) == each
        result = {"status": "complete", "profile": json.loads(each.to_json())}
        assert Profile.from_json(json.dumps(result)) == each


def texts() -> Iterator[tuple[str, str]]:
    good = json.loads(profile(2).to_json())
    yield "", "no profile"
    yield "[]", "no profile"
    yield "{}", "no profile"
    yield '{"profile": null}', "no profile"
    yield json.dumps({**good, "format": 2}), "format 2, this version 1"
    yield json.dumps({**good, "round_s": float("nan")}), "not numbers >= 0"
    yield json.dumps({**good, "worker_step_s": [0.0, 0.0]}), "no profile"
    yield json.dumps({**good, "worker_step_s": [-1.0]}), "no profile"
    yield json.dumps({**good, "rows": 0}), "rows and rounds are not >= 1"
    yield json.dumps({**good, "rows": "many"}), "rows is 'many'"
    yield json.dumps({**good, "traffic": {**good["traffic"], "up": "x"}}), "no profile"
    yield json.dumps({**good, "traffic": {**good["traffic"], "period": 0}}), "are not >= 1"
    yield json.dumps({**good, "traffic": {"through": "driver"}}), "no profile"
    yield json.dumps({name: each for name, each in good.items() if name != "rows"}), "no profile"


@every_row(*texts())
def test_what_is_no_profile_is_refused(text: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Profile.from_json(text)
