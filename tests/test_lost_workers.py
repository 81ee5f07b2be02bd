"""Workers that are lost cost their own window; no row is counted twice or left out."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from by_keyword import run
from every_row import every, every_row
from misbehaving import run_with_breaks, seen_through
from support.faults import Proxy
from support.replay import recorded_commits, relative_difference, replay
from toys import classification, make_job, mlp
from virtual_time import VirtualClock, coordinator_of
from waiting import WAIT_S, eventually

from sparkdl.averager import Averager
from sparkdl.errors import DeadlineError
from sparkdl.feed.feed import FeedOptions
from sparkdl.strategies import ParameterAveraging
from sparkdl.testing import _threads

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("nobody_stays")

SIZES = [40, 33, 21]


@pytest.mark.nightly_variants
@pytest.mark.parametrize(
    ("optimizer", "wire_dtype", "within"),
    [(torch.optim.SGD, "bfloat16", 5e-4), (torch.optim.NAdam, "float32", 1e-6)],
)
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 4))]
)
@pytest.mark.parametrize("exchange_rows", [False, True])
def test_connections_reset_at_any_byte_cost_no_row(
    tmp_path: Path, seed: int, optimizer: Any, wire_dtype: Any, within: float, exchange_rows: bool
) -> None:
    """Ten connections break, somewhere between the first byte and the last of the run."""
    generator = random.Random(seed)
    limits = [generator.randrange(1, 12_000) for _ in range(10)]
    job = make_job(
        mlp(),
        optimizer=partial(optimizer, lr=0.01),
        strategy=ParameterAveraging(period=2, wire_dtype=wire_dtype),
        epochs=8,
        max_failures=40,
        feed=FeedOptions(exchange_rows=exchange_rows),
    )
    shards = classification(SIZES).shards()
    with recorded_commits() as commits:
        outcome, proxy = run_with_breaks(job, shards, tmp_path, limits)
    assert proxy.breaks >= 3
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 8
    assert relative_difference(outcome.module, replay(job, shards, commits)) < within


@every_row(([10], 1), ([110], 1), ([60] * 3, 0))
def test_a_connection_that_breaks_while_the_ends_prove_themselves_is_tried_again(
    tmp_path: Path, limits: list[int], max_failures: int
) -> None:
    """Before its worker has joined it is no loss."""
    job = make_job(mlp(), max_failures=max_failures)
    outcome, proxy = run_with_breaks(job, classification(SIZES).shards(), tmp_path, limits)
    assert proxy.breaks == len(limits)
    assert [row.examples for row in outcome.history] == [sum(SIZES)]


@every("limit", range(1500, 5000, 1400))
def test_steps_before_the_first_commit_are_forgotten_with_their_optimizers_state(
    tmp_path: Path, limit: int
) -> None:
    """All three connections break in their first window, so that nothing was committed."""
    adam = partial(torch.optim.Adam, lr=0.01)
    job = make_job(mlp(), optimizer=adam, strategy=ParameterAveraging(2), max_failures=3)
    shards = classification(SIZES).shards()
    with recorded_commits() as commits:
        outcome, proxy = run_with_breaks(job, shards, tmp_path, [limit] * len(SIZES))
    assert proxy.breaks == 3
    assert relative_difference(outcome.module, replay(job, shards, commits)) < 1e-6


def test_a_worker_that_never_comes_back_is_named_with_why_it_was_lost(tmp_path: Path) -> None:
    job = make_job(mlp(), epochs=10_000, max_failures=9, deadline_s=60.0)
    shards = classification(SIZES).shards()
    start = _threads(job, shards, tmp_path)
    clock = VirtualClock()

    @contextmanager
    def launch(averager: Averager) -> Iterator[None]:
        coordinator = coordinator_of(averager)
        with Proxy(averager.address) as proxy, start(seen_through(proxy, averager)):

            def break_for_good() -> None:
                assert eventually(lambda: coordinator.committed.round > 1)
                proxy.__exit__(None, None, None)

            breaking = threading.Thread(target=break_for_good)
            breaking.start()
            with clock.running_once(averager, lambda: len(averager.losses) == 3):
                yield
            breaking.join(WAIT_S)

    with pytest.raises(DeadlineError, match=r"did not come back \(rank \d on .* within 60 s"):
        run(job, 3, launch, now=clock)
    assert 60 <= clock.passed <= 62
