"""The model of run times against processes that are known, and the best cut-off in closed form."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from every_row import every

from sparkdl.averager.policies.cutoff import Numbers, RunTimes, best_cutoff

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


def test_of_equal_times_everyone_is_waited_for() -> None:
    for count in (1, 2, 7, 158):
        assert best_cutoff(np.full((3, count), 0.1), np.empty((3, 0))) == count


def test_samples_are_sorted_before_their_mean_is_taken() -> None:
    # Each time another of four is ten times as slow.
    times = np.where(np.eye(4, dtype=bool), 10.0, 1.0)
    assert best_cutoff(times, np.empty((4, 0))) == 3


def test_late_ones_that_come_meanwhile_are_contributions_too() -> None:
    due, soon, never = np.array([[1.0, 2.2]]), np.array([[1.5, 2.0]]), np.array([[9.0, 9.0]])
    assert best_cutoff(due, never) == 1  # 1 / 1 against 2 / 2.2
    assert best_cutoff(due, soon) == 2  # 4 / 2.2


def test_what_lies_between_rounds_makes_it_worth_to_wait() -> None:
    due = np.array([[1.0, 2.2]])
    assert best_cutoff(due, NOBODY, between_s=0.1) == 1
    assert best_cutoff(due, NOBODY, between_s=0.3) == 2


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


def test_who_has_become_slow_is_expected_to_stay_slow() -> None:
    draw = np.random.default_rng(0)
    times = np.exp(0.05 * draw.normal(size=(20, 8)))
    times[14:, 3] *= 5
    times[:10, 5] *= 5
    expected = medians(fitted(times), 8)
    assert expected[3] == pytest.approx(5, rel=0.1)
    assert np.delete(expected, 3) == pytest.approx(1, rel=0.2)


def test_who_was_slow_once_is_not() -> None:
    draw = np.random.default_rng(0)
    times = np.exp(0.1 * draw.normal(size=(20, 8)))
    for round in range(20):  # another one each time, the last one too
        times[round, (3 * round) % 8] *= 5
    assert medians(fitted(times), 8).max() < 2


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


def test_a_window_that_lasts_longer_than_any_goes_on() -> None:
    draw = np.random.default_rng(0)
    model = fitted(np.exp(0.3 * draw.normal(size=(20, 4))))
    drawn = model.draw([0, 1], np.array([50.0, 0.0]))
    assert drawn[:, 0].min() >= 50
    assert np.median(drawn[:, 0]) == pytest.approx(50 * 2**0.3, rel=0.1)
    assert drawn[:, 1].max() < 5


def test_nothing_is_predicted_of_whom_too_little_is_known() -> None:
    model = RunTimes(3)
    model.fit()
    assert not model.knows([0])
    for round in range(3):
        for rank in (0, 1):
            model.note(rank, round, 1.0)
        model.fit()
        assert model.knows([0, 1]) is (round == 2)
    assert not model.knows([0, 1, 2])


def test_times_of_long_ago_are_forgotten() -> None:
    model = RunTimes(2)
    for round in range(30):
        model.note(0, round, 1.0)
        if round < 5:
            model.note(1, round, 100.0)
    model.fit()
    assert model.knows([0])
    assert not model.knows([1])


def test_the_same_seed_draws_the_same() -> None:
    times = np.random.default_rng(0).lognormal(size=(20, 4))
    first, second = (fitted(times).draw(range(4), np.zeros(4)) for _ in range(2))
    assert np.array_equal(first, second)


def test_thousands_of_workers_take_fewer_samples() -> None:
    model = fitted(np.random.default_rng(0).lognormal(size=(3, 5000)))
    assert model.draw(range(5000), np.zeros(5000)).shape == (40, 5000)
    assert model.draw(range(10), np.zeros(10)).shape == (128, 10)
