"""What averaging rounds take: ``gloo``, ``executors`` and ``scale``; ``hosts`` if it is named.

``gloo``: two workers contribute float32 parameters and receive their average, against gloo and
against Spark broadcast + treeReduce; for all the clock runs from the start until the last worker
has the result. Rounds are interleaved. gloo reduces and broadcasts with a third rank in place of
the driver, or the two workers all-reduce by themselves; Spark runs on local-cluster[2,1,2048] and
keeps its workers warm. On one host our connections are Unix sockets, and gloo's are TCP: ``hosts``
compares the two on hosts of their own instead (network namespaces, ``linked_hosts``; needs root),
rounds back to back, TCP on both sides.

``executors``: ParameterAveraging(aggregation="executors") against a bare all-reduce of the workers.
Ours checks for nonfinite values and forms the weighted mean; the peer only sums the same bytes.

``scale``: what a round costs the driver as workers are added: time, time per worker, memory,
threads. The averager runs in a process of its own. The workers are threads of four client
processes, which share its cores; rank 0 times the rounds, from its contribution to its reply.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import harness
import round_processes
import torch
from linked_hosts import LinkedHosts, hear, tell
from peers import gloo
from round_processes import Contributor, RoundProcesses

from sparkdl.averager.service.server import EdgeOptions
from sparkdl.collective import join_collective
from sparkdl.strategies.base import Run
from sparkdl.strategies.worker_group import WorkerGroup

if TYPE_CHECKING:  # the clients of ``scale`` do not import Spark
    from pyspark.sql import SparkSession

WORKERS = 2
LARGE = 25_000_000
SMALL = 10_000
OURS, GLOO, GLOO_WORKERS, SPARK = "sparkdl", "gloo", "gloo all-reduce of the workers", "spark"
LINKS_MBIT = (1_000, 10_000)
PORT = 29600
WARM_UP = 2
HOSTS_DEADLINE_S = 280.0
CONF = {
    "spark.driver.memory": "4g",  # the classic way collects every vector in the driver
    "spark.driver.maxResultSize": "4g",
    "spark.ui.showConsoleProgress": "false",
}

CLIENT_PROCESSES = 4
FEW, MANY, LARGER = (8, SMALL), (256, SMALL), (128, 1_000_000)
"""Workers and parameters."""
LARGER_ROUNDS = 5
SHARE_GROWTH = 1.3
MANY_S, LARGER_S, THEN = 0.076, 0.49, "dff983c5"
"""What the two largest took at a commit on this kind of machine, whose speed varies by a quarter:
not a claim, but a regression if it is exceeded by more than that."""
REGRESSION = 1.25
SCALE_TIMEOUT_S = 300.0


def main() -> None:
    """Measures what is asked for, and reports."""
    parts: dict[str, tuple[harness.Part, int, int]] = {
        "executors": (among_executors, 25, 5),
        "scale": (scale, 40, 5),
        "gloo": (against_gloo_and_spark, 15, 5),  # last, since Spark's JVM stays
        "hosts": (on_hosts, 15, 5),
    }
    usual = [*parts][:3]
    harness.measure_parts(
        "rounds", harness.parser(__doc__), parts, default=usual, child=rounds_of_a_world
    )


def against_gloo_and_spark(chosen: argparse.Namespace) -> tuple[list[harness.Claim], Any]:
    """Measures both sizes."""
    os.environ.update(harness.child_environment())
    spark = harness.session(conf=CONF)
    measured = {numel: measure(spark, numel, chosen.repeats) for numel in (LARGE, SMALL)}
    spark.stop()
    medians = {
        numel: harness.show_each(seconds, f"{{}}, {numel:,} parameters")
        for numel, seconds in measured.items()
    }
    claims = against_gloo(medians[LARGE], f"{LARGE:,} parameters")
    claims += [
        harness.faster(
            f"spark / sparkdl, {numel:,} parameters",
            medians[numel][OURS],
            medians[numel][SPARK],
            target=target,
        )
        for numel, target in ((LARGE, 8), (SMALL, 20))
    ]
    return claims, {"median_seconds": medians, "seconds": measured}


def measure(spark: SparkSession, numel: int, repeats: int) -> dict[str, list[float]]:
    """Returns the seconds of each round, by contender."""
    from peers import spark_round

    with (
        round_processes.rounds(WORKERS, numel) as ours,
        gloo.rounds(WORKERS, numel, driver=True) as with_driver,
        gloo.rounds(WORKERS, numel, driver=False) as among_workers,
    ):
        turns = {
            OURS: ours.round,
            GLOO: with_driver.round,
            GLOO_WORKERS: among_workers.round,
            SPARK: spark_round.SparkRounds(spark, WORKERS, numel).round,
        }
        return harness.interleave(turns, repeats=repeats, warmups=WARM_UP)


def against_gloo(medians: dict[str, harness.Median], where: str) -> list[harness.Claim]:
    """Returns the bounds that a round is held to by those of gloo."""
    return [
        harness.claim(f"sparkdl / {peer}, {where}", medians[OURS], medians[peer], target=1.5)
        for peer in (GLOO, GLOO_WORKERS)
    ]


def on_hosts(chosen: argparse.Namespace) -> tuple[list[harness.Claim], Any]:
    """Measures rounds of ``LARGE`` on hosts of their own."""
    claims: list[harness.Claim] = []
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, LinkedHosts(WORKERS, Path(name)) as linked:
        driver = linked.addresses[0]
        for mbit in LINKS_MBIT:
            linked.limit(mbit)
            shared = Path(name) / str(mbit)
            shared.mkdir()
            members: dict[str, list[Callable[[], Any]]] = {
                OURS: [
                    partial(serve, shared, driver),
                    *(partial(contribute, shared, rank, chosen.repeats) for rank in range(WORKERS)),
                ]
            }
            for contender, ranks in ((GLOO, WORKERS + 1), (GLOO_WORKERS, WORKERS)):
                given = ranks, f"tcp://{driver}:{PORT}", chosen.repeats
                members[contender] = [partial(gloo_rank, rank, *given) for rank in range(ranks)]
            slowest = {}
            for contender, parts in members.items():
                told = linked.call(parts, HOSTS_DEADLINE_S)
                slowest[contender] = [max(turn) for turn in zip(*filter(None, told), strict=True)]
            where = f"links of {mbit:,} Mbit/s"
            found[where] = harness.show_each(slowest, f"{{}}, {where}")
            claims += against_gloo(found[where], f"{LARGE:,} parameters, {where}")
    return claims, {"median_seconds": found}


def serve(shared: Path, host: str) -> None:
    """The driver's part: the averager, until all workers are done."""
    with round_processes.averager(WORKERS, LARGE, EdgeOptions(host=host)) as address:
        tell(shared / "address", address)
        for rank in range(WORKERS):
            hear(shared / f"done-{rank}")


def contribute(shared: Path, rank: int, repeats: int) -> list[float]:
    """A worker's part; returns the seconds of each round."""
    seconds = rounds_of_a_worker(rank, LARGE, hear(shared / "address"), repeats)
    tell(shared / f"done-{rank}", None)
    return seconds


def gloo_rank(rank: int, ranks: int, meeting: str, repeats: int) -> list[float]:
    """A rank's part; returns the seconds of each round."""
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    return timed(*gloo.member(rank, ranks, WORKERS, LARGE, meeting), rank, repeats)


def rounds_of_a_worker(rank: int, numel: int, address: Any, repeats: int) -> list[float]:
    """Takes part in the averager's rounds to their end; returns the seconds of each."""
    contributor = Contributor(rank, numel, address)
    seconds = timed(contributor.take_part, contributor.vector, rank, repeats)
    contributor.leave()
    return seconds


def timed(
    take_part: Callable[[], object], vector: torch.Tensor, rank: int, repeats: int
) -> list[float]:
    """Takes part in rounds, one after another; returns the seconds of each, without the first."""
    seconds = []
    for _ in range(WARM_UP + repeats):
        vector.fill_(rank)
        began = time.perf_counter()
        take_part()
        seconds.append(time.perf_counter() - began)
    return seconds[WARM_UP:]


def among_executors(chosen: argparse.Namespace) -> tuple[list[harness.Claim], Any]:
    """Measures rounds of ``LARGE`` without the driver."""
    with (
        tempfile.TemporaryDirectory() as folder,
        RoundProcesses(_executor, WORKERS, (Path(folder),), expected=(WORKERS - 1) / 2) as ours,
        gloo.rounds(WORKERS, LARGE, driver=False) as bare,
    ):
        turns = {"executors": ours.round, "bare all-reduce": bare.round}
        measured = harness.interleave(turns, repeats=chosen.repeats, warmups=WARM_UP)
    medians = harness.show_each(measured)
    name = f"executors / bare gloo all-reduce, {LARGE:,} parameters"
    claim = harness.claim(name, medians["executors"], medians["bare all-reduce"], target=1.15)
    return [claim], {"median_seconds": medians, "seconds": measured}


class _Folder:
    """Lets the ranks find each other through files, in place of an averager."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._store = torch.distributed.FileStore(str(folder / "gather"), WORKERS)
        self._rank = rank
        self._turn = 0

    def gather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """Give an object and receive those of all ranks."""
        self._turn += 1
        self._store.set(f"{self._turn}/{self._rank}", json.dumps(value))
        return [json.loads(self._store.get(f"{self._turn}/{rank}")) for rank in range(WORKERS)]


def _executor(rank: int, folder: Path) -> tuple[Callable[[], None], torch.Tensor]:
    averager = _Folder(folder, rank)
    joining = join_collective(rank, averager.gather, device="cpu", deadline_s=120.0)
    collective = joining.__enter__()
    run = Run(rank, cast(Any, None), cast(Any, averager), rows=64, collective=collective)
    vector = torch.empty(LARGE)
    group = WorkerGroup(run, 64)
    take_part = partial(group.average, [vector], [64] * WORKERS, run.window())
    take_part.joining = joining  # type: ignore[attr-defined] # keeps the group alive
    return take_part, vector


def scale(chosen: argparse.Namespace) -> tuple[list[harness.Claim], Any]:
    """Measures every size in a process of its own."""
    few, many, larger = (
        harness.call_child(
            __file__,
            *size,
            LARGER_ROUNDS if size == LARGER else chosen.repeats,
            environment=harness.child_environment() | {"OMP_NUM_THREADS": "1"},
            timeout=SCALE_TIMEOUT_S,
        )
        for size in (FEW, MANY, LARGER)
    )
    growth_mb = many["beyond_sums_mb"] - few["beyond_sums_mb"]
    bounds = [
        (
            f"a worker's share of a round, 256 workers / 8 workers, {SMALL:,} parameters",
            many["round_s"] / 256,
            few["round_s"] / 8,
            SHARE_GROWTH,
        ),
        (
            f"256 workers x {SMALL:,} parameters / {1e3 * MANY_S:.0f} ms at {THEN}",
            many["round_s"],
            MANY_S,
            REGRESSION,
        ),
        (
            f"128 workers x 1,000,000 parameters / {LARGER_S} s at {THEN}",
            larger["round_s"],
            LARGER_S,
            REGRESSION,
        ),
        ("driver's memory beyond the sums, 256 workers less 8, in MB / 32", growth_mb, 32, 1.0),
        ("the driver's threads, 256 workers less 8", many["threads"] - few["threads"], 1, 0.0),
    ]
    claims = [harness.claim(name, ours, peer, target=most) for name, ours, peer, most in bounds]
    return claims, {"few": few, "many": many, "larger": larger}


def rounds_of_a_world(workers: int, numel: int, repeats: int) -> dict[str, float]:
    """Rounds of one size, in this process; see ``scale`` for what is returned."""
    before = harness.status_bytes("VmRSS")
    clients = min(CLIENT_PROCESSES, workers)
    with (
        round_processes.averager(workers, numel, EdgeOptions()) as address,
        ProcessPoolExecutor(clients, multiprocessing.get_context("spawn")) as pool,
    ):
        running = [
            pool.submit(client_process, range(each, workers, clients), numel, address, repeats)
            for each in range(clients)
        ]
        threads = 0
        while not all(each.done() for each in running):
            threads = max(threads, threading.active_count())
            time.sleep(0.05)
        beyond = harness.status_bytes("VmHWM") - before - 2 * 4 * numel
        seconds, *_ = [each.result() for each in running]
    return {
        "round_s": statistics.median(seconds),
        "threads": threads,
        "beyond_sums_mb": beyond / 1e6,
    }


def client_process(ranks: range, numel: int, address: Any, repeats: int) -> list[float]:
    """One client process, with one thread per rank; returns the seconds of the first one's."""
    torch.set_num_threads(1)
    with ThreadPoolExecutor(len(ranks)) as pool:
        seconds, *_ = pool.map(
            lambda rank: rounds_of_a_worker(rank, numel, address, repeats), ranks
        )
    return seconds


if __name__ == "__main__":
    main()
