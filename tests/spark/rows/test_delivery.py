"""Which way rows go, by what is wished and what there is."""

from __future__ import annotations

import pytest

from sparkdl.errors import ConfigError
from sparkdl.spark.rows.delivery import SHUFFLES, Way, delivery_of

AS_IT_IS, GROUPED, SHUFFLED = Way.AS_IT_IS, Way.GROUPED, Way.SHUFFLED


@pytest.mark.parametrize(
    ("wish", "partitions", "gang_start_for", "way", "exchanged"),
    [
        ("exchange", 2, None, AS_IT_IS, True),
        ("exchange", 5, None, GROUPED, True),
        ("exchange", 1, None, GROUPED, True),
        ("exchange", None, None, GROUPED, True),
        ("exchange", 2, "X", AS_IT_IS, True),
        ("exchange", 5, "X", SHUFFLED, False),
        ("exchange", None, "X", SHUFFLED, False),
        ("spark", 2, None, AS_IT_IS, False),
        ("spark", 5, None, SHUFFLED, False),
        ("spark", None, "X", SHUFFLED, False),
        ("none", 2, "X", AS_IT_IS, False),
        ("none", 5, None, GROUPED, False),
        ("none", None, "X", GROUPED, False),
    ],
)
def test_rows_go_this_way_to_two_tasks(
    wish: str, partitions: int | None, gang_start_for: str | None, way: Way, exchanged: bool
) -> None:
    found = delivery_of(partitions, 2, 1, wish, gang_start_for)
    assert (found.way, found.exchanged) == (way, exchanged)
    assert bool(found.reason) is (way is SHUFFLED)


def test_a_single_worker_exchanges_with_nobody() -> None:
    assert not delivery_of(5, 1, 1, "exchange", None).exchanged
    assert delivery_of(5, 1, 2, "exchange", None).exchanged  # the task is two workers


@pytest.mark.parametrize("wish", SHUFFLES)
def test_only_rows_that_are_to_stay_cannot_be_shuffled_after_all(wish: str) -> None:
    delivery = delivery_of(2, 2, 1, wish, None)
    if wish == "none":
        with pytest.raises(ConfigError, match="cannot be read as they are: because"):
            delivery.shuffled("because")
    else:
        shuffled = delivery.shuffled("because")
        assert shuffled.way is SHUFFLED
        assert shuffled.exchanged is delivery.exchanged


def test_rows_that_are_to_stay_in_partitions_that_barrier_mode_refuses_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"has 5 for 2 tasks .* df\.repartition\(2\)"):
        delivery_of(5, 2, 1, "none", "X")
