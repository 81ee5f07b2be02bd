"""Which way rows go, by what is wished and what there is."""

from __future__ import annotations

import pytest

from sparkdl.errors import ConfigError
from sparkdl.spark.rows.delivery import SHUFFLES, Way, delivery_of

AS_IT_IS, GROUPED, MOVED, SHUFFLED = Way


def test_rows_go_this_way_to_two_tasks() -> None:
    cases: list[tuple[str, int | None, str | None, Way, bool]] = [
        ("exchange", 2, None, AS_IT_IS, True),
        ("exchange", 5, None, GROUPED, True),
        ("exchange", 1, None, GROUPED, True),
        ("exchange", None, None, GROUPED, True),
        ("exchange", 2, "X", AS_IT_IS, True),
        ("exchange", 5, "X", MOVED, True),
        ("exchange", None, "X", MOVED, True),
        ("spark", 2, None, AS_IT_IS, False),
        ("spark", 5, None, SHUFFLED, False),
        ("spark", None, "X", SHUFFLED, False),
        ("none", 2, "X", AS_IT_IS, False),
        ("none", 5, None, GROUPED, False),
        ("none", None, "X", GROUPED, False),
    ]
    wrong = []
    for wish, partitions, gang_start_for, way, exchanged in cases:
        found = delivery_of(partitions, 2, 1, wish, gang_start_for)
        if (found.way, found.exchanged) != (way, exchanged) or bool(found.reason) != (
            way in (MOVED, SHUFFLED)
        ):
            wrong.append((wish, partitions, gang_start_for, found))
    assert wrong == []


def test_a_single_worker_exchanges_with_nobody() -> None:
    assert not delivery_of(5, 1, 1, "exchange", None).exchanged
    assert delivery_of(5, 1, 2, "exchange", None).exchanged  # the task is two workers


def test_only_rows_that_are_to_stay_cannot_be_shuffled_after_all() -> None:
    assert SHUFFLES == ("exchange", "spark", "none")
    for wish in ("exchange", "spark"):
        delivery = delivery_of(2, 2, 1, wish, None)
        moved = delivery.shuffled("because")
        assert (moved.way, moved.exchanged) == (MOVED, delivery.exchanged)
        shuffled = moved.shuffled("because")
        assert (shuffled.way, shuffled.exchanged) == (SHUFFLED, delivery.exchanged)
    with pytest.raises(ConfigError, match="cannot be read as they are: because"):
        delivery_of(2, 2, 1, "none", None).shuffled("because")


def test_rows_that_are_to_stay_in_partitions_that_barrier_mode_refuses_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"has 5 for 2 tasks .* df\.repartition\(2\)"):
        delivery_of(5, 2, 1, "none", "X")
