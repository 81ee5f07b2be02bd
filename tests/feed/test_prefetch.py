"""A thread makes items ahead of need."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from sparkdl.feed.prefetch import prefetched


def test_items_come_in_order_and_an_error_in_its_place() -> None:
    def source() -> Any:
        yield from range(20)
        raise ZeroDivisionError("at 20")

    items = prefetched(source())
    assert [next(items) for _ in range(20)] == list(range(20))
    with pytest.raises(ZeroDivisionError, match="at 20"):
        next(items)


def test_no_more_than_a_few_items_are_made_ahead() -> None:
    made: list[int] = []

    def source() -> Any:
        for item in range(1000):
            made.append(item)
            yield item

    items = prefetched(source())
    for _ in range(5):
        next(items)
    items.close()
    assert len(made) <= 5 + 4


def test_closing_early_ends_the_thread_and_the_source() -> None:
    items = prefetched(iter(range(10**9)))
    next(items)
    items.close()
    assert not [t for t in threading.enumerate() if t.name == "sparkdl-prefetch"]
