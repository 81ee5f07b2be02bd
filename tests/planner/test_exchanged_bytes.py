"""What each strategy sends: the formulas of the docs, and what the driver's connections counted."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from every_row import every
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from toys import classification, make_job, mlp

from sparkdl.driver import first_replica, initial_center
from sparkdl.planner.traffic import TABLE, Traffic, table, traffic_of
from sparkdl.protocols import Segment
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
"""Strategies by the row of the table."""


def test_each_row_of_the_table_is_what_its_strategies_send() -> None:
    assert len(EXAMPLES) == len(TABLE)
    for row, strategies in EXAMPLES.items():
        for strategy in strategies:
            for workers, per_host in ((1, 1), (2, 2), (8, 4), (10, 2)):
                says = formula(TABLE[row][1], workers, workers // per_host)
                sends = of(strategy).bytes_a_step(workers, per_host)
                assert sends == pytest.approx(says, rel=3e-3), (strategy, workers)


def test_the_page_has_the_table() -> None:
    """Write it anew: PYTHONPATH=.:tests python tests/planner/test_exchanged_bytes.py."""
    assert table() in PAGE.read_text()


def test_one_worker_among_workers_exchanges_nothing() -> None:
    for strategy in (*EXAMPLES[0], *EXAMPLES[1], *EXAMPLES[4]):
        assert of(strategy).bytes_a_step(1) == 0.0


@every("reduced", [GradientAllReduce, partial(ParameterAveraging, 1, aggregation="executors")])
def test_along_trees_fewer_messages_wait_for_each_other_and_more_bytes(reduced: Any) -> None:
    """Of k-ary trees with D levels, in m chunks: 2 (D + m - 1) steps with an m-th each."""
    whole = P if reduced is GradientAllReduce else sum(each.numel * 4 for each in LAYOUT)
    for workers, chunk_kb, levels, chunks in ((8, 256, 2, 1), (8, 10, 2, 10), (64, 50, 3, 2)):
        sent = of(reduced(reduction=ColorTrees(4, chunk_kb)))
        assert sent.hops(workers) == 2.5 * 2 * (levels + chunks - 1)
        assert sent.passing(workers) == pytest.approx(2 * (levels + chunks - 1) / chunks * whole)
        assert sent.bytes_a_step(workers) == 2 * whole
        assert (sent.hops(1), sent.passing(1), sent.bytes_a_step(1)) == (0, 0, 0)


def test_compressed_gradients_are_smaller_and_small_ones_are_sent_whole() -> None:
    assert of(GradientAllReduce(compression="bf16")).up == P / 2
    assert of(GradientAllReduce(accumulate=4)).period == 4
    tiny = traffic_of(GradientAllReduce(compression=PowerSGD(2)), LAYOUT, [torch.zeros(3, 3)])
    assert tiny is not None
    assert tiny.up == 36


@every(
    "strategy",
    [
        GossipAveraging(),
        ThresholdGradientSharing(),
        ThresholdGradientSharing(aggregation="executors"),
        GradientAllReduce(compression=TopK(0.1)),
        GradientAllReduce(compression=OneBitAdam(10)),
        GradientAllReduce(preconditioner=KFACPreconditioner()),
        GradientAllReduce(hybrid=Hybrid("*")),
        GradientAllReduce(shard_optimizer=True),
        OuterOptimizer(((1, 1), (2, 4))),
    ],
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


@every(
    ("strategy", "optimizer"),
    [
        (ParameterAveraging(2), partial(torch.optim.Adam, lr=0.01)),
        (ParameterAveraging(2, wire_dtype="bfloat16"), partial(torch.optim.SGD, lr=0.01)),
        (ElasticAveraging(2), partial(torch.optim.SGD, lr=0.01)),
        (OuterOptimizer(2, wire_dtype="float8"), partial(torch.optim.SGD, lr=0.01)),
    ],
)
def test_workers_send_to_the_driver_what_the_formula_says(
    strategy: Strategy[Any], optimizer: Any
) -> None:
    """Each takes four steps in each of two epochs, two rounds an epoch."""
    outcome = run_world(
        make_job(mlp(), strategy=strategy, optimizer=optimizer, batch_size=4, epochs=2),
        classification([16, 16]).shards(),
    )
    recording = outcome.recording
    assert recording.setup.traffic is not None
    assert recording.windows.tolist() == [4, 4]
    assert recording.sent.tolist() == [4 * recording.setup.traffic.up] * 2


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
    assert found is not None
    assert (found.up, found.state) == (408, 208)


def test_a_strategy_of_ones_own_has_the_bytes_of_its_wire_format() -> None:
    class Own(ParameterAveraging):
        pass

    assert of(Own(7)).up == P
    job = make_job(nn.Linear(6, 3), strategy=Own(2))
    replica = first_replica(job)
    layout, _ = initial_center(replica, with_optimizer=True)
    found = traffic_of(job.strategy, layout, replica.trainable())
    assert found is not None
    assert found.up == sum(each.numel * each.dtype.itemsize for each in layout)


if __name__ == "__main__":
    page = PAGE.read_text()
    begin = page.index("| | bytes per step")
    end = page.index("\n\n", begin) + 1
    PAGE.write_text(page[:begin] + table() + page[end:])
