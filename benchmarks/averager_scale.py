"""What a round costs the driver as workers are added: time, time per worker, memory, threads.

The averager runs in this process. The workers are threads of four client processes, which share
its cores; rank 0 times the rounds, from its contribution to its reply.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

# The harness is imported where it is used: it imports Spark, which the clients must not do.
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
TIMEOUT_S = 300.0


def main() -> None:
    """Measures every size in a process of its own, and reports."""
    import harness

    options = harness.parser(__doc__)
    options.add_argument("--one", help=argparse.SUPPRESS)
    chosen = harness.parse(options, repeats=40, quick_repeats=5)
    if chosen.one:
        print(json.dumps(measure(**json.loads(chosen.one))), flush=True)
        return
    found: dict[str, dict[str, float]] = {}
    for numel, worlds in SIZES.items():
        for workers in worlds:
            repeats = max(5, chosen.repeats * 10_000 // numel) if numel > 10_000 else chosen.repeats
            one = json.dumps({"workers": workers, "numel": numel, "repeats": repeats})
            command = [sys.executable, __file__, "--one", one]
            figures = harness.run_child(
                command, environment=harness.child_environment(), timeout=TIMEOUT_S
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
    harness.report("averager_scale", claims(found), found)


def claims(found: dict[str, dict[str, float]]) -> list[Any]:
    """The bounds that the figures, by size, are held to."""
    import harness

    def share(workers: int) -> float:
        return found[f"{workers} x 10000"]["round_s"] / workers

    small, large = found["256 x 10000"], found["128 x 1000000"]
    growth_mb = small["beyond_sums_mb"] - found["8 x 10000"]["beyond_sums_mb"]
    return [
        harness.Claim(
            name="a worker's share of a round, 256 workers / 8 workers, 10,000 parameters",
            ratio=share(256) / share(8),
            target=SHARE_GROWTH,
        ),
        harness.Claim(
            name=f"256 workers x 10,000 parameters / {1e3 * SMALL_S:.0f} ms at {THEN}",
            ratio=small["round_s"] / SMALL_S,
            target=REGRESSION,
        ),
        harness.Claim(
            name=f"128 workers x 1,000,000 parameters / {LARGE_S} s at {THEN}",
            ratio=large["round_s"] / LARGE_S,
            target=REGRESSION,
        ),
        harness.Claim(
            name="driver's memory beyond the sums, 256 workers less 8, in MB / 32",
            ratio=growth_mb / 32,
            target=1.0,
        ),
        harness.Claim(
            name="the driver's threads, 256 workers less 8",
            ratio=small["threads"] - found["8 x 10000"]["threads"],
            target=0.0,
        ),
    ]


def measure(workers: int, numel: int, repeats: int) -> dict[str, float]:
    """Rounds of one size, in this process; see ``main`` for what is returned."""
    import torch

    from sparkdl.averager.coordination.run_state import RunSpec
    from sparkdl.averager.service.server import Averager, AveragerSpec
    from sparkdl.averager.service.snapshot import Snapshot
    from sparkdl.averager.values.center import CenterSpec
    from sparkdl.averager.values.wire_format import FullPrecision
    from sparkdl.protocols import Segment

    layout = (Segment("parameters", torch.float32, numel),)
    context = multiprocessing.get_context("spawn")
    seconds: Any = context.Array("d", repeats + 2, lock=False)
    before = resident_mb()
    spec = AveragerSpec(
        run=RunSpec(world_size=workers, deadline_s=120),
        center=CenterSpec(layout=layout, wire_format=FullPrecision()),
    )
    with Averager(spec, Snapshot(center=[torch.zeros(numel)])) as driver:
        starter = threading.Thread(target=start, args=(driver,), daemon=True)
        starter.start()
        clients = min(CLIENT_PROCESSES, workers)
        processes = [
            context.Process(
                target=serve,
                args=(range(each, workers, clients), numel, driver.address, repeats + 2, seconds),
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
        beyond = resident_mb(peak=True) - before - 2 * 4 * numel / 1e6
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
        "beyond_sums_mb": beyond,
    }


def start(driver: Any) -> None:
    """Lets the workers start once all have reported on their rows, as a driver does."""
    for number, _ in enumerate(driver.events()):
        if number == 0:
            driver.start()


def serve(ranks: range, numel: int, address: Any, rounds: int, seconds: Any) -> None:
    """One client process, with one thread per rank."""
    import torch

    torch.set_num_threads(1)
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            take_part(rank, numel, address, rounds, seconds)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    if failures:
        raise failures[0]


def take_part(rank: int, numel: int, address: Any, rounds: int, seconds: Any) -> None:
    """One worker: one round after another."""
    import torch

    from sparkdl.averager.client.client import AveragerClient
    from sparkdl.averager.values.wire_format import FullPrecision
    from sparkdl.events import WindowReport
    from sparkdl.feed.statistics.shards import ShardStatistics
    from sparkdl.protocols import Segment

    vector = torch.empty(numel)
    with AveragerClient(address, rank, FullPrecision(), deadline_s=120) as client:
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


def resident_mb(*, peak: bool = False) -> float:
    """This process's resident memory, in MB."""
    field = "VmHWM" if peak else "VmRSS"
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"/proc/self/status has no {field}: this benchmark needs Linux")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
