"""Plans from profiles of trainings whose costs are known: predictions, suggestions, words."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from every_row import every, every_row
from hypothesis import given
from hypothesis import strategies as st
from profiles import A_BYTE, BATCH, BYTES, FIXED_S, PERIOD, STEP_S, STEPS, profile, traffic

from sparkdl.errors import ConfigError
from sparkdl.planner.links import Link, most_workers
from sparkdl.planner.plan import Plan
from sparkdl.planner.profile import Profile
from sparkdl.planner.traffic import Traffic

AMONG = traffic(through="workers", up=BYTES, down=0.0)
GRADIENTS = traffic(through="workers", up=BYTES, down=0.0, period=1, hidden="backward", places=())


def round_s(workers: int) -> float:
    return FIXED_S + A_BYTE * 2 * BYTES * workers


def of_two(**changes: Any) -> Plan:
    return Plan([profile(1), profile(2)], **changes)


def among(workers: int) -> Profile:
    return profile(workers, traffic=AMONG, aggregation="executors")


def of_both(**changes: Any) -> Plan:
    """In the driver and among executors, where what is beside the bytes takes as long."""
    return Plan([profile(1), profile(2), among(1), among(2)], **changes)


def test_two_fits_tell_apart_what_rounds_take_for_bytes_and_what_they_take_anyway() -> None:
    for workers in (1, 2, 4, 8, 40):
        steps = math.ceil(STEPS / workers)
        expected = steps * STEP_S + math.ceil(steps / PERIOD) * round_s(workers)
        predicted = of_two().predict(workers)
        assert predicted.seconds == pytest.approx(expected)
        passing = math.ceil(steps / PERIOD) * A_BYTE * 2 * BYTES * workers
        assert predicted.parts.passing == pytest.approx(passing)


@every_row(
    (0.02, (1.96, 3.78, 7.03, 12.36), 51.0),
    (0.05, (1.91, 3.50, 6.00, 9.33), 21.0),
    (0.10, (1.83, 3.14, 4.89, 6.77), 11.0),
    (0.20, (1.71, 2.67, 3.69, 4.57), 6.0),
)
def test_averaging_in_the_driver_speeds_up_as_the_table_of_lemma_1_says(
    overhead: float, speedups: tuple[float, ...], ceiling: float
) -> None:
    """What more workers do not divide is their bytes, that part of what they do divide."""
    bytes_s = overhead * (PERIOD * STEP_S + FIXED_S)
    fits = [profile(each, exchange_s=FIXED_S + bytes_s * each) for each in (1, 2)]
    plan = Plan(fits, rows=BATCH * PERIOD * 10**8)
    found = [plan.predict(each).efficiency * each for each in (2, 4, 8, 16)]
    assert found == pytest.approx(speedups, abs=0.005)
    assert plan.predict(100_000).efficiency * 100_000 == pytest.approx(ceiling, rel=0.001)
    assert f"at most {ceiling:.3g} times as fast as one" in plan.explain()


def test_as_many_workers_are_suggested_as_lemma_1_allows() -> None:
    overhead = A_BYTE * 2 * BYTES / (PERIOD * STEP_S + FIXED_S)
    many = BATCH * PERIOD * 720_720  # divisible by many numbers of workers
    assert of_two(rows=many, workers=[40]).best(0.8).workers == most_workers(overhead, 0.8)
    best = of_both(rows=many, workers=[40]).best(0.8)
    assert (best.workers, best.aggregation) == (40, "executors")
    assert best.params["strategy"] == {"aggregation": "executors"}


def test_one_fit_leaves_open_how_much_of_a_round_is_bytes() -> None:
    """All of it fixed, or all of it growing with the workers: the truth lies between."""
    one, truth = Plan([profile(2)]).predict(8), of_two().predict(8)
    assert one.low < truth.seconds < one.high
    assert one.seconds >= truth.seconds
    assert one.low / 0.85 < truth.seconds
    assert Plan([profile(2)]).predict(2).seconds == pytest.approx(of_two().predict(2).seconds)


def test_one_fit_leaves_that_open_for_fewer_workers_than_it_had_too() -> None:
    one, truth = Plan([profile(2)]).predict(1), of_two().predict(1)
    assert one.low < one.seconds < truth.seconds < one.high


def test_a_slower_link_adds_what_its_bytes_take() -> None:
    plan = of_two(link="100 Mbit/s")
    steps = STEPS // 4
    added = steps // PERIOD * 4 * 2 * BYTES / 12.5e6
    assert plan.predict(4).seconds == pytest.approx(of_two().predict(4).seconds + added)


def test_the_fits_own_link_is_taken_out_of_what_they_took() -> None:
    slow = Link(12.5e6, 1e-3)
    wire = 1 / slow.bandwidth
    fits = [
        profile(each, exchange_s=round_s(each) + wire * 2 * BYTES * each + 2 * slow.latency)
        for each in (1, 2)
    ]
    fixed = math.ceil(STEPS / 8 / PERIOD) * (FIXED_S + 2 * slow.latency)
    assert Plan(fits).predict(8).parts.fixed == pytest.approx(fixed)
    for link in (Link(125e6), Link(1.25e6, 5e-3)):
        moved = Plan(fits, measured_on=slow, link=link).predict(8)
        assert moved.seconds == pytest.approx(of_two(link=link).predict(8).seconds)
    same = Plan(fits, measured_on=slow).predict(8).seconds
    assert same == pytest.approx(Plan(fits, measured_on=slow, link=slow).predict(8).seconds)
    assert same == pytest.approx(Plan(fits).predict(8).seconds)


@given(
    slower=st.floats(1e5, 1e10),
    times=st.floats(1, 100),
    workers=st.integers(1, 64),
    place=st.sampled_from(["driver", "executors"]),
)
def test_a_faster_link_never_predicts_a_slower_epoch(
    slower: float, times: float, workers: int, place: str
) -> None:
    a, b = (
        of_both(link=Link(each, 1e-3)).predict(workers, aggregation=place)
        for each in (slower, slower * times)
    )
    assert b.seconds <= a.seconds * (1 + 1e-12)
    assert b.low <= a.low * (1 + 1e-12)
    assert a.low <= a.seconds <= a.high


def test_one_worker_among_workers_exchanges_nothing() -> None:
    plan = Plan([among(2)], link="1 Mbit/s")
    assert plan.predict(1).parts.passing == 0.0
    assert plan.predict(1).efficiency == 1.0


@every_row((AMONG, "executors"), (GRADIENTS, None), (replace(AMONG, hidden="steps"), None))
def test_one_worker_alone_does_not_tell_what_exchanging_among_workers_takes(
    sent: Traffic, place: str | None
) -> None:
    """Latency, encoding and applying are there whatever the bytes are: nothing is guessed."""
    for link in (None, "1 Gbit/s"):
        with pytest.raises(ConfigError, match="add the profile of a fit with 2 workers"):
            Plan([profile(1, traffic=sent, aggregation=place)], link=link)


def test_where_no_fit_formed_its_means_nothing_is_predicted() -> None:
    plan = of_two()
    assert (plan.aggregations, plan.not_measured) == (["driver"], ["executors"])
    with pytest.raises(ConfigError, match=r"was not measured, .* fit once with it on 2 workers"):
        plan.predict(4, aggregation="executors")
    assert "Not compared: aggregation='executors', which no fit had" in plan.explain()
    assert of_both().not_measured == []


def test_a_fit_in_another_place_tells_what_a_step_takes_there_too() -> None:
    """One with 2 workers in the driver, one with 4 rows more a minibatch among the executors."""
    rows = BATCH + 4
    step_s = (STEP_S * rows / BATCH,) * 2
    other = replace(among(2), batch_size=rows, worker_step_s=step_s)
    plan = Plan([profile(2), other], batch_size=2 * BATCH)
    for place in ("driver", "executors"):
        assert plan.predict(1, aggregation=place).parts.computing == pytest.approx(STEPS * STEP_S)


@every_row((1.1, 0.0), (1.2, 0.02))
def test_what_a_ring_takes_beyond_its_wire_is_its_messages_but_for_a_fifth_of_the_bytes(
    overhead: float, message: float
) -> None:
    wire = Link(12.5e6)

    def round_s(workers: int) -> float:
        passing = overhead * AMONG.passing(workers) / wire.bandwidth
        return FIXED_S + passing + message * 2 * (workers - 1)

    fits = [replace(among(each), round_s=round_s(each)) for each in (1, 2)]
    for workers in (1, 2, 4, 8):
        steps = math.ceil(STEPS / workers)
        expected = steps * STEP_S + math.ceil(steps / PERIOD) * round_s(workers)
        predicted = Plan(fits, measured_on=wire).predict(workers)
        assert predicted.seconds == pytest.approx(expected)
        unknown = Plan(fits).predict(workers)  # all of it by bytes
        assert unknown.seconds <= predicted.seconds * (1 + 1e-9)


def test_gradients_that_are_sent_while_computing_are_told_by_a_fit_with_one_worker() -> None:
    def fit(workers: int) -> Any:
        taken = (STEP_S + A_BYTE * GRADIENTS.passing(workers),) * workers
        changes = {"traffic": GRADIENTS, "aggregation": None, "worker_step_s": taken}
        return profile(workers, exchange_s=0.0, **changes)

    plan = Plan([fit(1), fit(2)])
    steps = math.ceil(STEPS / 8)
    assert plan.predict(8).seconds == pytest.approx(steps * (STEP_S + A_BYTE * BYTES * 2 * 7 / 8))
    assert plan.best().aggregation is None
    with pytest.raises(ConfigError, match="add the profile of a fit with 1 worker"):
        Plan([fit(2)])
    with pytest.raises(ConfigError, match="has no period: raise batchSize"):
        plan.predict(4, period=10)


@every("measured", ["fast", "slow"])
@every("gradients_s", [0.001, 0.012, 0.1])
def test_gradients_in_several_buckets_hide_behind_the_backward_pass(
    measured: str, gradients_s: float
) -> None:
    """Four of them behind two thirds of 20 ms, but for its first quarter: at most 10 ms.

    The last one is sent after it in any case. By hand, for 2 and 8 workers; 2 workers send half of
    what a worker's 7/4 are with 8.
    """
    sent = replace(GRADIENTS, buckets=4)
    link = Link(BYTES / gradients_s)

    def step_s(workers: int) -> float:
        whole = gradients_s * 2 * (workers - 1) / workers
        return STEP_S + max(whole - 0.010, whole / 4)

    def fit(workers: int) -> Profile:
        taken = (STEP_S if measured == "fast" else step_s(workers),) * workers
        changes = {"traffic": sent, "aggregation": None, "worker_step_s": taken}
        return profile(workers, exchange_s=0.0, **changes)

    where = {"link": link} if measured == "fast" else {"measured_on": link}
    plan = Plan([fit(1), fit(2)], **where)
    for workers in (1, 2, 8):
        assert plan.predict(workers).seconds == pytest.approx(STEPS / workers * step_s(workers))


def test_workers_that_wait_for_nobody_are_as_fast_as_alone_until_the_driver_s_link_is_full() -> (
    None
):
    alone = traffic(waits=False, places=())
    fits = [profile(1, traffic=alone, exchange_s=0.010)]
    plan = Plan(fits, link=Link(100e6))
    window = PERIOD * STEP_S + 0.010 + 2 * BYTES / 100e6
    assert plan.predict(2).seconds == pytest.approx(STEPS / 2 / PERIOD * window)
    # A byte takes 10 ns on the link and 5 ns of the processors, so that a million take 15 ms.
    many = plan.predict(40)
    assert many.seconds == pytest.approx(STEPS / 40 / PERIOD * 40 * 0.015)
    assert many.bound == "the driver's link"


def test_what_is_exchanged_while_training_goes_on_counts_beyond_the_steps_only() -> None:
    hidden = traffic(hidden="steps", places=())
    plan = Plan([profile(2, traffic=hidden, exchange_s=FIXED_S)], link=Link(100e6))
    few, many = plan.predict(4), plan.predict(20)
    assert few.parts.passing == 0.0
    assert many.seconds == pytest.approx(STEPS / 20 / PERIOD * (20 * 0.02 + FIXED_S))
    with pytest.raises(ConfigError, match=r"while it trains on\. Name the network"):
        Plan([profile(2, traffic=hidden)])


def test_by_host_only_as_many_contribute_as_there_are_hosts() -> None:
    by_host = {"traffic": traffic(through="hosts"), "aggregation": "hierarchical"}
    fits = [profile(each, hosts=each // 2) for each in (2, 4)]
    fits += [
        profile(each, hosts=each // 2, exchange_s=FIXED_S + A_BYTE * BYTES * each, **by_host)
        for each in (2, 4)
    ]
    plan = Plan(fits)
    assert plan.aggregations == ["driver", "hierarchical"]
    assert plan.not_measured == ["executors"]
    by_host, by_worker = (plan.predict(8, aggregation=each) for each in ("hierarchical", "driver"))
    assert by_worker.parts.passing == pytest.approx(2 * by_host.parts.passing)


def test_the_slowest_worker_sets_the_pace_of_several() -> None:
    fits = [profile(2, worker_step_s=(STEP_S * 0.8, STEP_S * 1.2))]
    plan = Plan(fits)
    assert plan.predict(4).parts.uneven == pytest.approx(STEPS / 4 * STEP_S * 0.2)
    assert plan.predict(1).parts.uneven == 0.0


def test_fits_with_two_sizes_of_minibatches_predict_a_third() -> None:
    """A step takes 4 ms, and half a millisecond a row."""
    fits = [profile(1, batch_size=size, worker_step_s=(4e-3 + 0.5e-3 * size,)) for size in (32, 64)]
    plan = Plan(fits, batch_size=100)
    assert plan.predict(1).parts.computing == pytest.approx(STEPS * BATCH / 100 * 54e-3)
    with pytest.raises(ConfigError, match="add a profile with another batchSize"):
        Plan(fits[:1], batch_size=100)


def test_epochs_that_differ_make_the_range_wider() -> None:
    steady, wild = (
        Plan([profile(1, epoch_seconds=each), profile(2)]).predict(4)
        for each in ((1.0, 1.0, 1.0), (0.5, 1.0, 1.5))
    )
    assert wild.high - wild.low > 1.5 * (steady.high - steady.low)
    assert steady.high / steady.seconds == pytest.approx(1.15)


def test_the_best_is_what_a_search_over_all_finds() -> None:
    plan = of_both(workers=[20], rows=BATCH * PERIOD * 720_720)
    for alpha in (0.5, 0.8, 0.95):
        best = plan.best(alpha)
        found = (
            plan.predict(workers, aggregation=place)
            for workers in range(1, 21)
            for place in ("driver", "executors")
        )
        fastest = min((e for e in found if e.efficiency >= alpha), key=lambda each: each.seconds)
        assert (best.workers, best.aggregation) == (fastest.workers, fastest.aggregation)


def test_a_longer_period_is_suggested_only_if_it_may_be_and_no_longer_than_it_must() -> None:
    plan = of_two(link="100 Mbit/s", workers=[8], rows=BATCH * PERIOD * 720_720)
    assert plan.best(0.8).workers < 8
    best = plan.best(0.8, max_period=1000)
    assert best.workers == 8
    assert plan.predict(8, aggregation=best.aggregation, period=best.period).efficiency >= 0.8
    shorter = plan.predict(8, aggregation=best.aggregation, period=best.period - 1)
    assert shorter.efficiency < 0.8
    assert best.params["strategy"]["period"] == best.period


def test_where_nothing_is_efficient_one_worker_is_best() -> None:
    plan = Plan([profile(2, exchange_s=10.0)], workers=[4])
    assert plan.best(1.0).workers == 1


def test_a_plan_says_where_it_was_measured_what_bounds_it_and_what_would_move_that() -> None:
    plan = of_both(link="100 Mbit/s", workers=[1, 2, 16])
    for told in (repr(plan), plan.explain()):
        assert "1 and 2 workers: workers on a; driver: b" in told
    explained = plan.explain()
    # 13 rounds of 32 MB at 12.5 MB/s, and 1.5 ns of the processors for each byte.
    assert (
        "efficiency of 9%: the driver's link 33.3 s, computing 1.26 s, the processors'" in explained
    )
    assert "With aggregation='executors', faster from 2 workers on" in explained
    assert "With period=10" in explained
    assert "On links of 200 Mbit/s" in explained
    assert "at most 1.64 times as fast as one" in explained
    # 16 workers' million bytes both ways take 2.56 s, which is 128 steps.
    assert "from period 128 on." in explained
    assert "lemma" not in explained
    assert plan.table["workers"].tolist() == [1, 1, 2, 2, 16, 16]
    assert "<table" in plan._repr_html_()
    assert "numWorkers=" in str(plan.best())


@every(
    ("sent", "place"),
    [
        *((traffic(), "driver"), (AMONG, "executors")),
        *((GRADIENTS, None), (traffic(waits=False, places=()), None)),
    ],
)
def test_every_kind_of_plan_can_be_explained(sent: Traffic, place: str | None) -> None:
    fits = [profile(each, traffic=sent, aggregation=place) for each in (1, 2)]
    for link in (None, "1 Gbit/s, 1 ms"):
        plan = Plan(fits, link=link)
        assert "With 16 workers an epoch takes" in plan.explain()
        assert plan.best().workers >= 1


@every_row(
    ({"link": "0 Gbit/s"}, "carries nothing"),
    ({"link": "fast"}, "cannot be read"),
    ({"workers": []}, "none to plan for"),
    ({"workers": [0]}, "workers must be a whole number >= 1"),
    ({"workers": [2.5]}, "workers must be a whole number"),
    ({"workers": [1, 10**9]}, "workers must be at most 100,000, got 1,000,000,000"),
    ({"rows": 0}, "rows must be a whole number"),
    ({"batch_size": True}, "batch_size must be a whole number"),
)
def test_what_cannot_be_planned_for_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        of_two(**arguments)


@every_row(
    ({"model": "Other"}, "model is 'Net' in one and 'Other' in another"),
    ({"trained": 7}, "trained is 250000 in one and 7"),
    ({"strategy": "AsynchronousSGD()"}, "algorithm is"),
)
def test_the_profile_of_another_training_is_refused(changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Plan([profile(1), profile(2, **changes)])


def test_no_profile_and_a_strategy_without_a_formula_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one profile"):
        Plan([])
    with pytest.raises(ConfigError, match="no formula for what GossipAveraging"):
        Plan([replace(profile(2), traffic=None, strategy="GossipAveraging()")])
    with pytest.raises(ConfigError, match="'elsewhere' is none of ParameterAveraging"):
        of_two().predict(2, aggregation="elsewhere")
