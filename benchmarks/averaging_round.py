"""Time of one averaging round, against gloo and against Spark broadcast + treeReduce.

Two workers contribute float32 parameters and receive their average; for all contenders the clock
runs from the start until the last worker has the result. Rounds are interleaved. gloo reduces and
broadcasts with a third rank in place of the driver, or the two workers all-reduce by themselves;
Spark runs on local-cluster[2,1,2048] and keeps its workers warm. On one host our connections are
Unix sockets, and gloo's are TCP: ``--hosts`` compares the two on hosts of their own instead
(network namespaces, ``linked_hosts``; needs root), rounds back to back, TCP on both sides.
"""

import os
import pickle
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import averager_rounds
import harness
import torch
import torch.distributed as dist
from linked_hosts import LinkedHosts
from peers import gloo_all_reduce, gloo_round, spark_round
from pyspark.sql import SparkSession

from sparkdl.averager.service.loop import EdgeOptions

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


def main() -> None:
    """Measures both sizes and reports."""
    options = harness.parser(__doc__)
    options.add_argument("--hosts", action="store_true", help="on hosts of their own, nothing else")
    chosen = harness.parse(options, repeats=15, quick_repeats=5)
    if chosen.hosts:
        on_hosts(chosen.repeats)
        return
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
    harness.report(
        "averaging_round",
        claims(medians),
        {"median_seconds": medians, "seconds": measured},
    )


def measure(spark: SparkSession, numel: int, repeats: int) -> dict[str, list[float]]:
    """Returns the seconds of each round, by contender."""
    with (
        tempfile.TemporaryDirectory() as folder,
        averager_rounds.rounds(WORKERS, numel) as ours,
        tempfile.TemporaryDirectory() as other_folder,
        gloo_round.rounds(WORKERS, numel, Path(folder)) as gloo,
        gloo_all_reduce.rounds(WORKERS, numel, Path(other_folder)) as gloo_workers,
    ):
        turns = {
            "sparkdl": ours.round,
            GLOO: gloo.round,
            GLOO_WORKERS: gloo_workers.round,
            "spark": spark_round.SparkRounds(spark, WORKERS, numel).round,
        }
        return harness.interleave(turns, repeats=repeats, warmups=2)


def claims(medians: dict[int, dict[str, float]]) -> list[harness.Claim]:
    """Returns the bounds that the medians, by size and contender, are held to."""
    large, small = medians[LARGE], medians[SMALL]
    return [
        *(
            harness.Claim(
                name=f"sparkdl / {gloo}, {LARGE:,} parameters",
                ratio=large["sparkdl"] / large[gloo],
                target=1.5,
            )
            for gloo in (GLOO, GLOO_WORKERS)
        ),
        harness.Claim(
            name=f"spark / sparkdl, {LARGE:,} parameters",
            ratio=large["spark"] / large["sparkdl"],
            target=8,
            at_least=True,
        ),
        harness.Claim(
            name=f"spark / sparkdl, {SMALL:,} parameters",
            ratio=small["spark"] / small["sparkdl"],
            target=20,
            at_least=True,
        ),
    ]


def on_hosts(repeats: int) -> None:
    """Measures rounds of ``LARGE`` on hosts of their own, and reports."""
    medians: dict[str, float] = {}
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
        harness.Claim(
            name=f"sparkdl / {gloo}, {LARGE:,} parameters, links of {mbit:,} Mbit/s",
            ratio=medians[f"sparkdl, links of {mbit:,} Mbit/s"]
            / medians[f"{gloo}, links of {mbit:,} Mbit/s"],
            target=1.5,
        )
        for mbit in LINKS_MBIT
        for gloo in (GLOO, GLOO_WORKERS)
    ]
    harness.report("averaging_round --hosts", claims, {"median_seconds": medians})


def serve(shared: Path, host: str) -> None:
    """The driver's part: the averager, until all workers are done."""
    with averager_rounds.averager(WORKERS, LARGE, EdgeOptions(host=host)) as address:
        (shared / "written").write_bytes(pickle.dumps(address))
        (shared / "written").rename(shared / "address")
        while len(list(shared.glob("done-*"))) < WORKERS:
            time.sleep(0.1)


def contribute(shared: Path, rank: int, repeats: int) -> list[float]:
    """A worker's part; returns the seconds of each round."""
    while not (shared / "address").exists():
        time.sleep(0.01)
    address = pickle.loads((shared / "address").read_bytes())
    seconds = timed(*averager_rounds.member(rank, LARGE, address), rank, repeats)
    (shared / f"done-{rank}").touch()
    return seconds


def gloo_rank(rank: int, ranks: int, address: str, repeats: int) -> list[float]:
    """A rank's part; returns the seconds of each round."""
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    timeout = timedelta(seconds=HOSTS_DEADLINE_S)
    store = dist.TCPStore(address, PORT, is_master=rank == 0, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    vector = torch.empty(LARGE)
    with_driver = partial(gloo_round.take_part, rank, WORKERS, vector)
    seconds = timed(
        with_driver if ranks > WORKERS else partial(dist.all_reduce, vector), vector, rank, repeats
    )
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


if __name__ == "__main__":
    main()
