"""The model that a run must have ended with: its committed windows, trained again by hand.

Whichever workers were lost on the way, only what was committed counts. So one process that trains
every committed window from the center that it began with, and forms every round's mean, has to
arrive at the same parameters.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sparkdl.averager.coordination.committed import CommittedProgress
from sparkdl.driver import initial_center
from sparkdl.events import WindowReport
from sparkdl.feed.feed import Feed
from sparkdl.feed.shards import DataStatistics
from sparkdl.replica import Replica
from sparkdl.reshuffle import RowExchange, RowServer
from sparkdl.reshuffle.exchange import Everyone
from sparkdl.testing import Shard
from sparkdl.worker import Job

Commits = list[list[WindowReport]]
"""The windows of each round that was committed."""


@contextmanager
def recorded_commits() -> Iterator[Commits]:
    """Record what this process's runs commit within the context; one run at a time."""
    commits: Commits = []
    commit = CommittedProgress.commit

    def recording(self: CommittedProgress, windows: Iterable[WindowReport], *rest: Any) -> None:
        windows = list(windows)
        commits.append(windows)
        commit(self, windows, *rest)

    CommittedProgress.commit = recording  # type: ignore[method-assign]
    try:
        yield commits
    finally:
        CommittedProgress.commit = commit  # type: ignore[method-assign]


def replay(
    job: Job,
    shards: Sequence[Shard],
    commits: Commits,
    move: Callable[[list[Tensor], list[Tensor]], list[Tensor]] = lambda center, mean: mean,
) -> nn.Module:
    """Train what was committed, and only that.

    Args:
        job: the run's job. Its strategy averages in the driver, including the optimizer's state,
            and its model draws no random numbers: a window then depends only on the center.
        shards: the rows of each rank, as the run had them.
        commits: the windows that the run committed.
        move: computes the next center from the center and the mean of a round's contributions.

    Returns:
        The module with the last center's parameters and buffers.
    """
    replica = job.replica()
    _, center = initial_center(replica, with_optimizer=True)
    replica.module.train()
    # A copy, because the center shares the replica's memory.
    center = [segment.clone() for segment in center]
    steps, moved = dict.fromkeys(range(len(shards)), 0), False
    with _feeds(job, shards) as feeds:
        for windows in commits:
            contributions: dict[tuple[float, int], list[Tensor]] = {}
            for window in windows:
                first = steps[window.rank]
                steps[window.rank] = 0 if window.last else window.step_of_epoch
                if window.weight:
                    _put(replica, center)
                    if not moved:  # not every optimizer's state begins with zeros
                        replica.reset_optimizer_state()
                    _train(replica, feeds[window.rank], window, first)
                    contributions[window.weight, window.rank] = [
                        values.clone() for values in replica.segments(with_optimizer=True)
                    ]
            if contributions:
                center, moved = move(center, _mean(contributions)), True
    _put(replica, center)
    return replica.release()


def relative_difference(first: nn.Module, second: nn.Module) -> float:
    """The largest difference of two modules' values, relative to the largest of each tensor."""
    mine, other = first.state_dict(), second.state_dict()
    return max(
        float((mine[name] - value).abs().max() / value.abs().max().clamp_min(1e-12))
        for name, value in other.items()
    )


@contextmanager
def _feeds(job: Job, shards: Sequence[Shard]) -> Iterator[list[Feed]]:
    """The rows of every rank."""
    with tempfile.TemporaryDirectory(prefix="sparkdl-testing-") as folder, ExitStack() as stack:
        feeds, found = [], []
        for rank, shard in enumerate(shards):
            feed = Feed(
                job.schema,
                batch_size=job.batch_size,
                seed=job.seed,
                rank=rank,
                directory=Path(folder),
                options=job.feed,
            )
            feeds.append(stack.enter_context(feed))
            found.append(feed.fill(shard))
        if job.feed.exchange_rows:
            _exchange_rows(job, feeds, DataStatistics.of(found))
        yield feeds


def _exchange_rows(job: Job, feeds: Sequence[Feed], found: DataStatistics) -> None:
    """Exchange rows as the workers do before the first epoch."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(RowServer("127.0.0.1", "replay", job.deadline_s)) for _ in feeds
        ]
        everyone = Everyone.of(found.parts, [server.address for server in servers])

        def exchange(rank: int) -> None:
            part = RowExchange(
                rank=rank,
                server=servers[rank],
                token="replay",
                everyone=lambda: everyone,
                specs=job.schema.stored,
                seed=job.seed,
                deadline_s=job.deadline_s,
            )
            feeds[rank].reshuffle(1, part)

        with ThreadPoolExecutor(len(feeds)) as pool:
            list(pool.map(exchange, range(len(feeds)), timeout=job.deadline_s))


def _put(replica: Replica, center: list[Tensor]) -> None:
    for values, segment in zip(replica.segments(with_optimizer=True), center, strict=True):
        values.copy_(segment)


def _train(replica: Replica, feed: Feed, window: WindowReport, first_step: int) -> None:
    batches = feed.epoch(window.epoch, first_step=first_step)
    for _ in range(window.step_of_epoch - first_step):
        replica.step(next(batches))


def _mean(contributions: dict[tuple[float, int], list[Tensor]]) -> list[Tensor]:
    total = sum(weight for weight, _ in contributions)
    return [
        sum(
            (values.double() * (weight / total))
            for (weight, _), values in zip(contributions, segments, strict=True)
        ).to(segments[0].dtype)
        for segments in zip(*contributions.values(), strict=True)
    ]
