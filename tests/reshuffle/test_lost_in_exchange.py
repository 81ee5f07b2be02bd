"""Workers that are lost before, in and after an exchange of rows: no row is lost with them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from every_row import every
from support.replay import recorded_commits, relative_difference, replay
from torch import Tensor, nn
from toys import classification, make_job, mlp, relative_error
from waiting import eventually

from sparkdl.feed.feed import FeedOptions
from sparkdl.reshuffle.exchange import RowExchange
from sparkdl.strategies import GradientAllReduce, ParameterAveraging
from sparkdl.testing import run_world

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("nobody_stays")

SIZES = [40, 0, 21]
EXCHANGED = FeedOptions(exchange_rows=True)


class Dies(nn.Module):
    """Ends rank 1's process once, at a moment of its life."""

    def __init__(self, folder: Path, moment: str) -> None:
        super().__init__()
        self.net = mlp()
        self.mark = str(folder / "died")
        self.moment = moment
        self.passes = 0

    def forward(self, features: Tensor) -> Tensor:
        self.passes += 1
        if self.moment == "after" and self.passes == 5:
            self.die()
        return self.net(features)

    def die(self) -> None:
        if multiprocessing.current_process().name == "rank 1" and not os.path.exists(self.mark):
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)


def dying(folder: Path, moment: str) -> Callable[[], nn.Module]:
    """Builds the model, and where the moment is one of the exchange's lies in wait for it."""

    def build() -> nn.Module:
        model = Dies(folder, moment)
        if moment == "before":
            _call_before(RowExchange, "__call__", lambda *_: model.die())
        if moment == "in":
            _call_before(RowExchange, "_answer", lambda *_: model.die())
        return model

    return build


def _call_before(kind: type, name: str, deed: Callable[..., None]) -> None:
    method = getattr(kind, name)

    def called(self: Any, *args: Any) -> Any:
        deed(self, *args)
        return method(self, *args)

    # In a rank's process, which nobody else uses.
    if multiprocessing.current_process().name.startswith("rank"):
        setattr(kind, name, called)


@pytest.mark.nightly_variants
@pytest.mark.parametrize("moment", ["before", "in", "after"])
def test_a_worker_that_is_killed_comes_back_to_the_same_rows(tmp_path: Path, moment: str) -> None:
    shards = classification(SIZES).shards()
    job = make_job(
        dying(tmp_path, moment),
        strategy=ParameterAveraging(2),
        epochs=3,
        max_failures=1,
        feed=EXCHANGED,
    )
    with recorded_commits() as commits:
        outcome = run_world(job, shards, ranks_as="processes")
    assert Path(tmp_path, "died").exists()
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 3
    assert relative_difference(outcome.module, replay(job, shards, commits)) < 1e-6


def test_a_worker_that_is_killed_is_back_in_time_for_one_that_still_fetches_its_rows(
    tmp_path: Path,
) -> None:
    """Rank 0 has contributed to a round meanwhile, which rank 2 cannot take part in before."""
    died = tmp_path / "died"

    def build() -> nn.Module:
        model = Dies(tmp_path, "after")
        model.passes = 4

        def until_it_is_gone(self: RowExchange, peer: int, *args: Any) -> None:
            if multiprocessing.current_process().name == "rank 2" and peer == 1:
                eventually(died.exists, 20)
                time.sleep(1)  # rank 0 contributes

        _call_before(RowExchange, "_fetch", until_it_is_gone)
        return model

    shards = classification([40, 12, 21]).shards()
    job = make_job(build, strategy=ParameterAveraging(2), epochs=2, max_failures=1, feed=EXCHANGED)
    with recorded_commits() as commits:
        outcome = run_world(job, shards, ranks_as="processes")
    assert died.exists()
    assert [row.examples for row in outcome.history] == [73] * 2
    assert relative_difference(outcome.module, replay(job, shards, commits)) < 1e-6


@every(
    ("options", "survivable"),
    [
        ({}, 3),
        ({"exchange_rows": True}, 3),
        ({"exchange_rows": True, "keep_exchanged": False}, 0),
        ({"exchange_rows": True, "reshuffle_every": 1}, 0),
        ({"reshuffle_every": 1}, 0),
    ],
)
def test_a_worker_comes_back_alone_only_if_others_still_have_what_they_gave_it(
    options: dict[str, Any], survivable: int
) -> None:
    job = make_job(mlp(), max_failures=3, feed=FeedOptions(**options))
    assert (job.survivable_losses, job.resubmissions) == (survivable, 3 - survivable)


@pytest.mark.nightly
@pytest.mark.parametrize("moment", ["before", "in", "after"])
def test_workers_that_cannot_come_back_alone_all_start_again(tmp_path: Path, moment: str) -> None:
    shards = classification(SIZES).shards()
    undisturbed = make_job(
        lambda: Dies(tmp_path, "never"), strategy=GradientAllReduce(), epochs=2, feed=EXCHANGED
    )
    expected = run_world(undisturbed, shards, ranks_as="processes")
    job = make_job(
        dying(tmp_path, moment),
        strategy=GradientAllReduce(),
        epochs=2,
        max_failures=1,
        feed=EXCHANGED,
    )
    outcome = run_world(job, shards, ranks_as="processes")
    assert Path(tmp_path, "died").exists()
    assert [row.examples for row in outcome.history] == [sum(SIZES)] * 2
    assert relative_error(outcome.module, expected.module) < 1e-6
