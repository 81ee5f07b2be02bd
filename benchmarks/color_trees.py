"""Seconds of an all-reduce along trees, against gloo's ring and against the alpha-beta model.

8 and 16 workers, each on a host of its own (network namespaces, ``studies/linked_hosts``), 1 kB to
100 MB. Before, alpha (seconds of a message) and beta (seconds a byte) are fitted to messages that
each host sends to the next, all at once. With N workers, W bytes, D levels and
m chunks of each of the trees' parts, the model says

    ring   2 (N - 1) (alpha + beta W / N)
    trees  2 (D + m - 1) (alpha + beta W / m)

All hosts share the cores of this machine, and links have no delay beside what their limit adds: a
message takes mostly processor time here, of which trees' messages need more. Needs root.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import Tensor

sys.path.append(str(Path(__file__).parent / "studies"))
from linked_hosts import LinkedHosts

from sparkdl.collective.tree_sum import TreeSum, height_of, usable_colors
from sparkdl.strategies import ColorTrees

SIZES = {"1 kB": 10**3, "10 kB": 10**4, "100 kB": 10**5, "1 MB": 10**6, "10 MB": 10**7}
SIZES["100 MB"] = 10**8
HOSTS = (8, 16)
TREES = ColorTrees()
RING, TREE, BEST = "gloo's ring", "trees", "trees, best chunks"
SMALL, LARGE = 10**3, 3 * 10**6
"""Bytes of the messages to which the model is fitted."""
PORT = 29600


def repeats_of(size: int, repeats: int) -> int:
    """How often a size is measured: less often if it takes seconds."""
    return repeats if size <= 10**6 else max(1, repeats // (5 if size <= 10**7 else 10))


def on_a_host(rank: int, workers: int, address: str, repeats: int) -> dict[str, Any]:
    """What a worker does; returns its seconds, by size and way, and those of messages."""
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    timeout = timedelta(seconds=200)
    store = dist.TCPStore(address, PORT, is_master=rank == 0, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers, timeout=timeout)
    own = dist.ProcessGroupGloo(dist.PrefixStore("trees", store), rank, workers, timeout)
    trees = TreeSum(own, TREES.colors, int(TREES.chunk_kb * 1024))
    fitted = [messages(rank, workers)]
    dist.broadcast_object_list(fitted, 0)
    found: dict[str, Any] = {"messages": fitted[0]}
    for name, size in SIZES.items():
        values = torch.ones(size // 4)
        best = TreeSum(own, TREES.colors, int(1024 * chunk_kb(size, workers, *fitted[0])))
        ways: dict[str, Callable[[Tensor], object]]
        ways = {RING: dist.all_reduce, TREE: trees, BEST: best}
        for way, add_up in ways.items():
            add_up(values)  # once without being counted
            found[f"{name}, {way}"] = []
        for _ in range(repeats_of(size, repeats)):
            for way, add_up in ways.items():
                dist.barrier()
                began = time.monotonic()
                add_up(values)
                found[f"{name}, {way}"].append(time.monotonic() - began)
    dist.barrier()
    return found


def messages(rank: int, workers: int) -> tuple[float, float]:
    """Seconds of a message, and those that each of its bytes adds; all hosts send at once."""
    taken = []
    for size, times in ((SMALL, 100), (LARGE, 2)):
        values, received = torch.ones(size // 4), torch.empty(size // 4)
        dist.barrier()
        began = time.monotonic()
        for _ in range(times):
            sending = dist.isend(values, (rank + 1) % workers)
            dist.recv(received, (rank - 1) % workers)
            sending.wait()
        taken.append((time.monotonic() - began) / times)
    beta = (taken[1] - taken[0]) / (LARGE - SMALL)
    return max(taken[0] - beta * SMALL, 1e-6), beta


def predicted(way: str, size: int, workers: int, alpha: float, beta: float) -> float:
    """Seconds by the model."""
    if way == RING:
        return 2 * (workers - 1) * (alpha + beta * size / workers)
    colors = usable_colors(workers, TREES.colors)
    kb = chunk_kb(size, workers, alpha, beta) if way == BEST else TREES.chunk_kb
    chunks = max(1, math.ceil(size / colors / (kb * 1024)))
    steps = 2 * (height_of(workers, colors) + chunks - 1)
    return steps * (alpha + beta * size / chunks)


def chunk_kb(size: int, workers: int, alpha: float, beta: float) -> float:
    """Size of a chunk with which the model takes least: m = sqrt((D - 1) W beta / alpha)."""
    colors = usable_colors(workers, TREES.colors)
    chunks = math.sqrt((height_of(workers, colors) - 1) * size * beta / alpha)
    return size / colors / max(1, round(chunks)) / 1024


def measure(workers: int, mbit: float, repeats: int) -> dict[str, Any]:
    """Measures one number of hosts; returns medians of the slowest worker, and predictions."""
    with tempfile.TemporaryDirectory() as name, LinkedHosts(workers - 1, Path(name)) as linked:
        linked.limit(mbit)
        address = linked._hosts.hosts[0].address
        parts = [partial(on_a_host, rank, workers, address, repeats) for rank in range(workers)]
        told = linked.call(parts, deadline_s=280.0)
    alpha, beta = told[0]["messages"]
    print(f"{workers} hosts: alpha {alpha * 1e6:.0f} us, beta {beta * 1e9:.2f} ns a byte")
    found: dict[str, Any] = {"alpha_s": alpha, "beta_s": beta, "seconds": {}, "predicted": {}}
    for what in [each for each in told[0] if each != "messages"]:
        slowest = [max(turn) for turn in zip(*(each[what] for each in told), strict=True)]
        size, _, way = what.partition(", ")
        found["predicted"][what] = predicted(way, SIZES[size], workers, alpha, beta)
        found["seconds"][what] = harness.show(
            f"{workers} hosts, {what} (predicted {found['predicted'][what]:.4f})", slowest
        )
    return found


def main() -> None:
    """Measures and reports."""
    options = harness.parser(__doc__)
    options.add_argument("--mbit", type=float, default=300.0, help="speed of the links")
    chosen = harness.parse(options, repeats=20, quick_repeats=3)
    found = {each: measure(each, chosen.mbit, chosen.repeats) for each in HOSTS}
    seconds = {each: found[each]["seconds"] for each in HOSTS}
    claims = [
        harness.Claim(
            name=f"{workers} hosts, {size}: time along trees / gloo's ring",
            ratio=seconds[workers][f"{size}, {TREE}"] / seconds[workers][f"{size}, {RING}"],
            target=target,
        )
        for size, target in (("1 kB", 0.5), ("100 kB", 0.7), ("1 MB", 1.0), ("100 MB", 1.1))
        for workers in reversed(HOSTS)
    ]
    claims += [
        harness.Claim(
            name=f"{way}, 10 MB and more: largest |measured / predicted - 1| / 0.2"
            if large
            else f"{way}, less than 10 MB: largest |measured / predicted - 1| / 0.2",
            ratio=max(
                abs(seconds[each][what] / found[each]["predicted"][what] - 1) / 0.2
                for each in HOSTS
                for what in seconds[each]
                if what.endswith(f", {way}") and (SIZES[what.partition(", ")[0]] >= 10**7) == large
            ),
            target=1.0,
        )
        for way in (RING, TREE, BEST)
        for large in (True, False)
    ]
    harness.report("color_trees", claims, {"mbit": chosen.mbit, "hosts": found})


if __name__ == "__main__":
    main()
