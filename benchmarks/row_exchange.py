"""Exchange of rows among four hosts on links of 1 Gbit/s, against the time that the bytes need.

Every host is a network namespace with a link of its own (``tc tbf``), and every worker a process on
it, without Spark. With "even", each host has as many rows; with "one has all", three hosts begin
with none. The bytes that have to move are those of the busiest direction of the busiest link. Needs
root, and the programs of iproute2.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch

from sparkdl.feed.store.partition_store import PartitionStore
from sparkdl.process.torch_settings import keep_freed_memory
from sparkdl.protocols import ColumnSpec
from sparkdl.reshuffle import RowExchange, RowServer
from sparkdl.reshuffle.exchange import Everyone
from sparkdl.reshuffle.server import exchange_plan

sys.path.insert(0, str(harness.FOLDER.parent / "tests" / "cluster"))
from hosts import Hosts  # type: ignore[import-not-found]

HOSTS = 4
MBIT = 1000.0
WIDTH = 64
SPECS = (ColumnSpec("features", torch.float32, (WIDTH,)), ColumnSpec("label", torch.int64))
ROW_BYTES = 4 * WIDTH + 8
SEED = 1
TARGET = 1.3
DEADLINE_S = 120.0


def main() -> None:
    """Measures and reports, or is one of the hosts' workers."""
    options = harness.parser(__doc__)
    options.add_argument("--rows", type=int, default=4_000_000, help="rows of all hosts together")
    chosen = harness.parse(options, repeats=5, child=take_part)
    even = [chosen.rows // HOSTS] * HOSTS
    loads = {"even": even, "one has all": [chosen.rows, *[0] * (HOSTS - 1)]}
    with tempfile.TemporaryDirectory() as folder, Hosts(HOSTS, Path(folder)) as hosts:
        for host in hosts.hosts:
            host.limit(MBIT)
        turns = {name: lambda rows=rows: exchanged(hosts, rows) for name, rows in loads.items()}
        measured = harness.interleave(turns, repeats=chosen.repeats)
    claims = []
    for name, seconds in measured.items():
        needed = bytes_to_move(loads[name]) * 8 / (MBIT * 1e6)
        middle = harness.show(f"{name}, for bytes that need {needed:.2f} s", seconds)
        claims.append(
            harness.claim(
                f"exchange / (bytes to move / link), {name}", middle, needed, target=TARGET
            )
        )
    harness.report("row_exchange", claims, {"seconds": measured})


def bytes_to_move(rows: list[int]) -> int:
    """Bytes of the busiest direction of the busiest link."""
    plan = exchange_plan(rows, len(rows), seed=SEED, epoch=1)
    moving = plan - np.diag(np.diag(plan))
    return int(max(moving.sum(axis=0).max(), moving.sum(axis=1).max())) * ROW_BYTES


def exchanged(hosts: Any, rows: list[int]) -> float:
    """Returns the seconds from the first worker's start of an exchange to the last one's end."""
    members = [
        host.run(
            [
                sys.executable,
                Path(__file__),
                "--child",
                json.dumps([rank, rows, host.address]),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=harness.FOLDER,
            env=harness.child_environment(),
        )
        for rank, host in enumerate(hosts.hosts)
    ]
    try:
        addresses = [json.loads(member.stdout.readline()) for member in members]
        for member in members:
            member.stdin.write(json.dumps(addresses) + "\n")
            member.stdin.flush()
        times = [json.loads(member.stdout.readline()) for member in members]
        for member in members:  # a worker that ended early would leave the others without its rows
            member.communicate("end\n", timeout=DEADLINE_S)
    finally:
        for member in members:
            member.kill()
            member.wait(10)
    return max(end for _, end in times) - min(start for start, _ in times)


def take_part(rank: int, rows: list[int], host: str) -> None:
    """One worker: says where it is, hears where all are, exchanges, and reports the times."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as every worker does
    with tempfile.TemporaryDirectory() as folder, RowServer(host, "token", DEADLINE_S) as server:
        store, received = (PartitionStore(Path(folder)) for _ in range(2))
        for first in range(0, rows[rank], 10_000):
            count = min(10_000, rows[rank] - first)
            store.append(SPECS, [torch.rand(count, WIDTH), torch.arange(first, first + count)])
        print(json.dumps(server.address), flush=True)
        by_rank = [[part] for part in enumerate(rows)]
        everyone = Everyone(by_rank, json.loads(sys.stdin.readline()))
        exchange = RowExchange(
            rank=rank,
            server=server,
            token="token",
            everyone=lambda: everyone,
            specs=SPECS,
            seed=SEED,
            deadline_s=DEADLINE_S,
        )
        # Linux counts from the machine's start, which is the same on each of these hosts.
        start = time.perf_counter()
        exchange(store, None, received, 1)
        print(json.dumps([start, time.perf_counter()]), flush=True)
        sys.stdin.readline()
        received.close()


if __name__ == "__main__":
    main()
