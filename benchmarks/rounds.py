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
import pickle
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import harness
import round_processes
import torch
import torch.distributed as dist
from peers import gloo
from round_processes import RoundProcesses

from sparkdl.averager.client.client import AveragerClient
from sparkdl.averager.service.server import EdgeOptions
from sparkdl.averager.values.wire_format import FULL_PRECISION
from sparkdl.collective import join_collective
from sparkdl.events import WindowReport
from sparkdl.feed.statistics.shards import ShardStatistics
from sparkdl.protocols import Segment
from sparkdl.strategies.base import Run
from sparkdl.strategies.worker_group import WorkerGroup

if TYPE_CHECKING:  # the clients of ``scale`` do not import Spark
    from pyspark.sql import SparkSession

WORKERS = 2
LARGE = 25_000_000
SMALL = 10_000
GLOO, GLOO_WORKERS = "gloo", "gloo all-reduce of the workers"
LINKS_MBIT = (1_000, 10_000)
PORT = 29600
WARM_UP = 2
HOSTS_DEADLINE_S = 280.0
CONF = {
    "spark.executor.memory": "2048m",
    "spark.driver.memory": "4g",  # the classic way collects every vector in the driver
    "spark.driver.maxResultSize": "4g",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}

CLIENT_PROCESSES = 4
SIZES = {
    10_000: (2, 8, 32, 128, 256),
    1_000_000: (2, 8, 32, 128),
}
SHARE_GROWTH = 1.3
SMALL_S, LARGE_S, THEN = 0.076, 0.49, "dff983c5"
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
    spark = harness.session(f"local-cluster[{WORKERS},1,2048]", CONF)
    measured = {numel: measure(spark, numel, chosen.repeats) for numel in (LARGE, SMALL)}
    spark.stop()
    medians = {
        numel: {
            name: harness.show(f"{name}, {numel:,} parameters", seconds)
            for name, seconds in by_name.items()
        }
        for numel, by_name in measured.items()
    }
    return claims(medians), {"median_seconds": medians, "seconds": measured}


def measure(spark: SparkSession, numel: int, repeats: int) -> dict[str, list[float]]:
    """Returns the seconds of each round, by contender."""
    from peers import spark_round

    with (
        tempfile.TemporaryDirectory() as folder,
        round_processes.rounds(WORKERS, numel) as ours,
        tempfile.TemporaryDirectory() as other_folder,
        gloo.with_driver(WORKERS, numel, Path(folder)) as with_driver,
        gloo.among_workers(WORKERS, numel, Path(other_folder)) as among_workers,
    ):
        turns = {
            "sparkdl": ours.round,
            GLOO: with_driver.round,
            GLOO_WORKERS: among_workers.round,
            "spark": spark_round.SparkRounds(spark, WORKERS, numel).round,
        }
        return harness.interleave(turns, repeats=repeats, warmups=2)


def claims(medians: dict[int, dict[str, harness.Median]]) -> list[harness.Claim]:
    """Returns the bounds that the medians, by size and contender, are held to."""
    large = medians[LARGE]
    return [
        *(
            harness.claim(
                f"sparkdl / {peer}, {LARGE:,} parameters",
                large["sparkdl"],
                large[peer],
                target=1.5,
            )
            for peer in (GLOO, GLOO_WORKERS)
        ),
        *(
            harness.Claim(
                name=f"spark / sparkdl, {numel:,} parameters",
                ratio=medians[numel]["spark"] / medians[numel]["sparkdl"],
                target=target,
                at_least=True,
                ours=medians[numel]["sparkdl"],
                peer=medians[numel]["spark"],
            )
            for numel, target in ((LARGE, 8), (SMALL, 20))
        ),
    ]


def on_hosts(chosen: argparse.Namespace) -> tuple[list[harness.Claim], Any]:
    """Measures rounds of ``LARGE`` on hosts of their own."""
    from linked_hosts import LinkedHosts

    repeats = chosen.repeats
    medians: dict[str, harness.Median] = {}
    with tempfile.TemporaryDirectory() as name, LinkedHosts(WORKERS, Path(name)) as linked:
        driver = linked._hosts.hosts[0].address
        given = driver, repeats
        for mbit in LINKS_MBIT:
            linked.limit(mbit)
            shared = Path(name) / str(mbit)
            shared.mkdir()
            members: dict[str, list[Callable[[], object]]] = {
                "sparkdl": [
                    partial(serve, shared, driver),
                    *(partial(contribute, shared, rank, repeats) for rank in range(WORKERS)),
                ],
                GLOO: [
                    partial(gloo_rank, rank, WORKERS + 1, *given) for rank in range(WORKERS + 1)
                ],
                GLOO_WORKERS: [
                    partial(gloo_rank, rank, WORKERS, *given) for rank in range(WORKERS)
                ],
            }
            for contender, parts in members.items():
                told = linked.call(parts, HOSTS_DEADLINE_S)
                label = f"{contender}, links of {mbit:,} Mbit/s"
                slowest = [max(turn) for turn in zip(*filter(None, told), strict=True)]
                medians[label] = harness.show(label, slowest)
    claims = [
        harness.claim(
            f"sparkdl / {peer}, {LARGE:,} parameters, links of {mbit:,} Mbit/s",
            medians[f"sparkdl, links of {mbit:,} Mbit/s"],
            medians[f"{peer}, links of {mbit:,} Mbit/s"],
            target=1.5,
        )
        for mbit in LINKS_MBIT
        for peer in (GLOO, GLOO_WORKERS)
    ]
    return claims, {"median_seconds": medians}


def serve(shared: Path, host: str) -> None:
    """The driver's part: the averager, until all workers are done."""
    with round_processes.averager(WORKERS, LARGE, EdgeOptions(host=host)) as address:
        (shared / "written").write_bytes(pickle.dumps(address))
        (shared / "written").rename(shared / "address")
        while len(list(shared.glob("done-*"))) < WORKERS:
            time.sleep(0.1)


def contribute(shared: Path, rank: int, repeats: int) -> list[float]:
    """A worker's part; returns the seconds of each round."""
    while not (shared / "address").exists():
        time.sleep(0.01)
    address = pickle.loads((shared / "address").read_bytes())
    seconds = timed(*round_processes.member(rank, LARGE, address), rank, repeats)
    (shared / f"done-{rank}").touch()
    return seconds


def gloo_rank(rank: int, ranks: int, address: str, repeats: int) -> list[float]:
    """A rank's part; returns the seconds of each round."""
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    timeout = timedelta(seconds=HOSTS_DEADLINE_S)
    store = dist.TCPStore(address, PORT, is_master=rank == 0, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    vector = torch.empty(LARGE)
    take_part = gloo.round_of(rank, ranks, WORKERS, vector)
    seconds = timed(take_part, vector, rank, repeats)
    dist.barrier()
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
        tempfile.TemporaryDirectory() as first,
        tempfile.TemporaryDirectory() as second,
        RoundProcesses(_executor, WORKERS, (Path(first),), expected=(WORKERS - 1) / 2) as ours,
        gloo.among_workers(WORKERS, LARGE, Path(second)) as bare,
    ):
        turns = {"executors": ours.round, "bare all-reduce": bare.round}
        measured = harness.interleave(turns, repeats=chosen.repeats, warmups=3)
    medians = {name: harness.show(name, seconds) for name, seconds in measured.items()}
    less = harness.claim(
        f"executors / bare gloo all-reduce, {LARGE:,} parameters",
        medians["executors"],
        medians["bare all-reduce"],
        target=1.15,
    )
    return [less], {"median_seconds": medians, "seconds": measured}


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
    found: dict[str, dict[str, float]] = {}
    for numel, worlds in SIZES.items():
        for workers in worlds:
            repeats = max(5, chosen.repeats * 10_000 // numel) if numel > 10_000 else chosen.repeats
            figures = harness.call_child(
                __file__,
                workers,
                numel,
                repeats,
                environment=harness.child_environment() | {"OMP_NUM_THREADS": "1"},
                timeout=SCALE_TIMEOUT_S,
            )
            found[f"{workers} x {numel}"] = figures
            print(
                f"{workers:>3} workers x {numel:>9,} parameters: "
                f"{1e3 * figures['round_s']:8.2f} ms a round, "
                f"{1e3 * figures['round_s'] / workers:.3f} ms a worker, "
                f"{1e3 * figures['driver_cpu_s']:.2f} ms of the driver's processor, "
                f"{figures['threads']:.0f} threads, "
                f"{figures['beyond_sums_mb']:.1f} MB beyond the sums",
                flush=True,
            )
    return claims_of_scale(found), found


def claims_of_scale(found: dict[str, dict[str, float]]) -> list[harness.Claim]:
    """The bounds that the figures, by size, are held to."""

    def share(workers: int) -> float:
        return found[f"{workers} x 10000"]["round_s"] / workers

    small, large = found["256 x 10000"], found["128 x 1000000"]
    few = found["8 x 10000"]
    growth_mb = small["beyond_sums_mb"] - few["beyond_sums_mb"]
    bounds = [
        (
            f"a worker's share of a round, 256 workers / 8 workers, {SMALL:,} parameters",
            share(256),
            share(8),
            SHARE_GROWTH,
        ),
        (
            f"256 workers x {SMALL:,} parameters / {1e3 * SMALL_S:.0f} ms at {THEN}",
            small["round_s"],
            SMALL_S,
            REGRESSION,
        ),
        (
            f"128 workers x 1,000,000 parameters / {LARGE_S} s at {THEN}",
            large["round_s"],
            LARGE_S,
            REGRESSION,
        ),
        ("driver's memory beyond the sums, 256 workers less 8, in MB / 32", growth_mb, 32, 1.0),
        ("the driver's threads, 256 workers less 8", small["threads"] - few["threads"], 1, 0.0),
    ]
    return [harness.claim(name, ours, peer, target=target) for name, ours, peer, target in bounds]


def rounds_of_a_world(workers: int, numel: int, repeats: int) -> dict[str, float]:
    """Rounds of one size, in this process; see ``scale`` for what is returned."""
    context = multiprocessing.get_context("spawn")
    seconds: Any = context.Array("d", repeats + 2, lock=False)
    before = harness.status_bytes("VmRSS")
    spec = workers, numel, EdgeOptions()
    with round_processes.averager(*spec, drain=True, deadline_s=120) as address:
        clients = min(CLIENT_PROCESSES, workers)
        processes = [
            context.Process(
                target=client_process,
                args=(range(each, workers, clients), numel, address, repeats + 2, seconds),
                daemon=True,
            )
            for each in range(clients)
        ]
        for process in processes:
            process.start()
        threads, processor = 0, []
        while any(process.is_alive() for process in processes):
            threads = max(threads, threading.active_count())
            processor.append((time.perf_counter(), time.process_time()))
            time.sleep(0.05)
        beyond = harness.status_bytes("VmHWM") - before - 2 * 4 * numel
        if any(process.exitcode for process in processes):
            raise RuntimeError("a client process failed")
    kept = list(seconds)[2:]
    # The driver's processor time per second of the rounds.
    (first, cpu_first), (last, cpu_last) = processor[len(processor) // 2], processor[-1]
    busy = (cpu_last - cpu_first) / max(last - first, 1e-9)
    return {
        "round_s": statistics.median(kept),
        "driver_cpu_s": busy * statistics.median(kept),
        "threads": threads,
        "beyond_sums_mb": beyond / 1e6,
    }


def client_process(ranks: range, numel: int, address: Any, rounds: int, seconds: Any) -> None:
    """One client process, with one thread per rank."""
    torch.set_num_threads(1)
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            client_rounds(rank, numel, address, rounds, seconds)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SCALE_TIMEOUT_S)
    if failures:
        raise failures[0]


def client_rounds(rank: int, numel: int, address: Any, rounds: int, seconds: Any) -> None:
    """One worker: one round after another."""
    vector = torch.empty(numel)
    with AveragerClient(address, rank, FULL_PRECISION, deadline_s=120) as client:
        layout = (Segment("parameters", torch.float32, numel),)
        client.start(ShardStatistics(rows=64, columns=()), [vector], layout)
        for number in range(rounds):
            vector.fill_(rank)
            window = WindowReport(
                rank=rank,
                epoch=1,
                step=number + 1,
                examples=64,
                loss_sum=0.0,
                last=number == rounds - 1,
            )
            begin = time.perf_counter()
            client.exchange([vector], window)
            if rank == 0:
                seconds[number] = time.perf_counter() - begin
        client.finish()


if __name__ == "__main__":
    main()
