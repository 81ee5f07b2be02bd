"""Who is waited for, and the times by which a cut-off is predicted."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from by_keyword import open_averager
from decided import Told, do
from decisions import AllButStragglers, Calls, Run, commit, only, outcomes, report, started
from every_row import every

from sparkdl.averager.cutoff import Numbers, RunTimes, best_cutoff
from sparkdl.averager.round_policy import Nobody, RoundPolicy
from sparkdl.averager.values.center_update import Contributions
from sparkdl.averager.values.wire_format import BFLOAT16_CHANGES, FULL_PRECISION
from sparkdl.errors import ConfigError
from sparkdl.protocols import Segment


def exchange(run: Run, rank: int, **window: Any) -> list[Told]:
    """A worker's contribution, and it takes what comes back."""
    decisions = run.contribute(rank, **window)
    run.take(rank)
    return decisions


class TestNobody:
    """Each worker alone with the center."""

    def run(self, world_size: int, **options: Any) -> Run:
        return started(world_size, policy=Nobody(), **options)

    def test_a_contribution_is_a_round_and_is_answered_at_once(self) -> None:
        run = self.run(3)
        assert run.close(1) == [do.open_sum((1,)), do.receive(run.members[1], 1)]
        assert run.add(1) == [
            commit(run, 1, share=1 / 3),
            do.report(report(1)),
            do.reply(run.members[1], final=False, values=True, worker_state=False),
        ]
        assert run.positions() == [0, 1, 0]

    def test_who_waits_is_let_in_in_the_order_of_arrival(self) -> None:
        run = self.run(4)
        for rank in (2, 3, 0, 1):
            run.close(rank)
        order = [2]
        while len(order) < 4:
            run.add(order[-1])
            (receive,) = only(do.receive, run.take(order[-1]))
            order.append(receive.member.rank)
        assert order == [2, 3, 0, 1]

    def test_staleness_counts_the_others_updates_since_the_center_was_sent(self) -> None:
        run = self.run(3)
        told = []
        for rank in (0, 0, 1, 2, 1, 0):
            # Rank 2 changes nothing.
            decisions = exchange(run, rank) if rank < 2 else run.close(rank, examples=0)
            run.take(rank)
            told += [decision.contributions for decision in only(do.commit, decisions)]
        assert [each.staleness for each in told] == [0, 0, 2, 0, 0, 2]
        assert told[-1] == Contributions((1,), 3, 2, share=1 / 3)

    def test_half_a_contribution_costs_nobody_else_anything(self) -> None:
        run = self.run(2, max_failures=1)
        run.close(0)
        run.close(1)
        assert run.lose(0) == [
            do.drop(run.members[0]),
            do.start_over(()),
            do.open_sum((1,)),
            do.receive(run.members[1], 1),
        ]

    def test_nobody_overwrites_the_center_that_others_are_still_sent_at_the_start(self) -> None:
        run = Run(2, policy=Nobody())
        for rank in run.ranks:
            run.join(rank)
            run.read(rank)
        run.start()
        run.take(0)
        assert run.close(0) == []
        assert run.take(1) == [do.open_sum((0,)), do.receive(run.members[0], 1)]

    def test_what_an_event_costs_does_not_depend_on_how_many_wait(self) -> None:
        assert self.calls(10) == self.calls(1000)

    def calls(self, world_size: int) -> int:
        """Calls of functions for an exchange, while all others wait for theirs."""
        run = self.run(world_size)
        for rank in run.ranks:
            run.close(rank)
        calls = Calls()
        gc.disable()  # what others have it call is none of the exchange
        try:
            with calls:
                run.add(0)
                run.take(0)
        finally:
            gc.enable()
        return calls.counted


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("policy", [Nobody, AllButStragglers])
def test_every_schedule_ends_as_its_faults_allow(policy: Callable[[], RoundPolicy]) -> None:
    ended = outcomes(policy, range(50))
    assert sum(outcome.failure is None for outcome in ended) > 32


@every("policy", [Nobody(), AllButStragglers(1)])
def test_replies_of_changes_are_refused_where_not_all_get_each_of_them(policy: RoundPolicy) -> None:
    with pytest.raises(ConfigError, match=f"'bfloat16' .* with {type(policy).__name__}"):
        open_averager((), [], 2, BFLOAT16_CHANGES, policy=policy)


@every("policy", [Nobody(), AllButStragglers(1)])
def test_fragments_are_refused_where_not_all_get_each_of_them(policy: RoundPolicy) -> None:
    layout = (Segment("parameters", torch.float32, 4),)
    with pytest.raises(ConfigError, match=f"2 fragments .* {type(policy).__name__} lets them"):
        open_averager(layout, [torch.zeros(4)], 2, FULL_PRECISION, policy=policy, fragments=2)


NOBODY = np.empty((1, 0))


def exponential_order(count: int, shift: float) -> Numbers:
    """Means of the ordered times of ``count`` workers that take shift + Exp(1)."""
    return np.array([[shift + sum(1 / (count - i) for i in range(c)) for c in range(1, count + 1)]])


@every(
    ("count", "shift", "best", "rate", "everyone"),
    [
        (16, 1.0, 11, 5.24, 3.65),
        (64, 1.0, 44, 20.5, 11.1),
        (158, 1.0, 108, 50.4, 23.8),
        (158, 3.0, 131, 27.6, 18.3),
    ],
)
def test_the_best_cutoff_of_exponential_times_is_that_of_their_closed_form(
    count: int, shift: float, best: int, rate: float, everyone: float
) -> None:
    times = exponential_order(count, shift)
    assert best_cutoff(times, NOBODY) == best
    assert best / times[0, best - 1] == pytest.approx(rate, rel=5e-3)
    assert count / times[0, -1] == pytest.approx(everyone, rel=5e-3)


def fitted(times: Numbers) -> RunTimes:
    """A model that has seen some rounds, of shape (rounds, workers)."""
    model = RunTimes(times.shape[1])
    for round, row in enumerate(times):
        for rank, seconds in enumerate(row):
            model.note(rank, round, seconds)
    model.fit()
    return model


def medians(model: RunTimes, workers: int, lasted: float = 0.0) -> Numbers:
    return np.median(model.draw(range(workers), np.full(workers, lasted)), axis=0)


NOISE: dict[str, Callable[[np.random.Generator, int], Numbers]] = {
    "shifted exponential": lambda draw, n: 1 + draw.exponential(1, (30, n)),
    "one in twenty ten times as slow": lambda draw, n: (
        np.exp(0.1 * draw.normal(size=(30, n))) * np.where(draw.random((30, n)) < 0.05, 10, 1)
    ),
}


@every("noise", NOISE)
def test_with_noise_of_any_shape_the_cutoff_is_nearly_as_good_as_the_best(noise: str) -> None:
    draw = np.random.default_rng(1)
    model = fitted(NOISE[noise](draw, 40))
    chosen = best_cutoff(model.draw(range(40), np.zeros(40)), np.empty((128, 0)))
    truth = np.sort(np.concatenate([NOISE[noise](draw, 40) for _ in range(50)]), axis=1)
    rates = np.arange(1, 41) / truth.mean(axis=0)
    assert rates[chosen - 1] > 0.93 * rates.max()
    assert rates[-1] < 0.7 * rates.max()


def test_what_is_common_to_all_does_not_hide_who_is_slow() -> None:
    draw = np.random.default_rng(0)
    times = np.exp(0.02 * draw.normal(size=(20, 30))) * draw.lognormal(0, 1, (20, 1))
    times[:, 7] *= 1.5
    expected = medians(fitted(times), 30)
    assert expected[7] / np.median(expected) == pytest.approx(1.5, rel=0.03)
    # The errors of prediction are the workers' own too.
    drawn = fitted(times).draw(range(30), np.zeros(30))
    assert np.log(drawn[:, 0]).std() < 0.05


def test_a_window_that_lasts_is_drawn_from_what_is_still_possible() -> None:
    draw = np.random.default_rng(0)
    model = fitted(1 + draw.exponential(1, (20, 50)))
    drawn = model.draw(range(50), np.full(50, 2.0))
    assert drawn.min() >= 2
    # What is left of an exponential time is one.
    assert drawn.mean() == pytest.approx(3, rel=0.1)
