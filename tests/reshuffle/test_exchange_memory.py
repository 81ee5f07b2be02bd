"""Rows that are four times as large as the memory for them are exchanged in flat memory."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from contextlib import ExitStack
from pathlib import Path

import pytest

BUDGET = 24 << 20
ROW_BYTES = 1032
RANK = """
    import json, re, sys
    from pathlib import Path
    import numpy as np, torch
    from sparkdl.process.allocator import keep_freed_memory
    from sparkdl.feed.store.partition_store import PartitionStore
    from sparkdl.protocols import ColumnSpec
    from sparkdl.reshuffle import RowExchange, RowServer
    from sparkdl.reshuffle.exchange import Everyone

    rank, rows, budget = map(int, sys.argv[1:4])
    directory = Path(sys.argv[4])
    torch.set_num_threads(1)
    keep_freed_memory()
    specs = (ColumnSpec("x", torch.float32, (256,)), ColumnSpec("id", torch.int64))

    def of_process(name):
        told = Path("/proc/self/status").read_text()
        return int(re.search(name + r":\\s+(\\d+) kB", told)[1]) * 1024

    def exchange(server, addresses, rows, epoch):
        old, new = (PartitionStore(directory, resident_bytes=budget or None) for _ in range(2))
        for first in range(0, rows, 500):
            ids = torch.arange(first, min(first + 500, rows)) + rank * rows
            old.append(specs, [ids.float()[:, None].expand(-1, 256).contiguous(), ids])
        order = torch.from_numpy(np.random.default_rng(rank).permutation(rows))
        everyone = Everyone([rows] * 2, addresses)
        RowExchange(
            rank=rank, server=server, token="secret", everyone=lambda: everyone,
            specs=specs, seed=3, deadline_s=60.0,
        )(old, order, new, epoch)
        return new

    with RowServer("127.0.0.1", "secret", 60.0) as server:
        print(json.dumps(server.address), flush=True)
        addresses = json.loads(sys.stdin.readline())
        exchange(server, addresses, 500, 1).close()  # loads what is loaded once
        before = of_process("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
        new = exchange(server, addresses, rows, 2)
        peak = of_process("VmHWM") - before
        parts = torch.arange(new.rows).split(500)
        total = sum(int(new.take(part)[1].sum()) for part in parts)
        print(json.dumps([peak, new.rows, total]), flush=True)
        sys.stdin.readline()  # the other one may still fetch rows
"""


@pytest.mark.slow
def test_rows_of_four_times_the_budget_are_exchanged_in_flat_memory(tmp_path: Path) -> None:
    rows = 4 * BUDGET // ROW_BYTES // 500 * 500
    script = textwrap.dedent(RANK)
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", script, *map(str, (rank, rows, BUDGET, tmp_path))],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(2)
        ]
        for process in ranks:
            stack.callback(process.kill)

        def said() -> list[list[int]]:
            return [json.loads(process.stdout.readline()) for process in ranks if process.stdout]

        def tell(words: str) -> None:
            for process in ranks:
                assert process.stdin is not None
                process.stdin.write(words + "\n")
                process.stdin.flush()

        tell(json.dumps(said()))
        found = said()
        tell("end")
    assert [count for _, count, _ in found] == [rows, rows]
    assert sum(total for _, _, total in found) == sum(range(2 * rows))
    # beside the mapped rows there are pieces of 1 MiB on their way, and some numbers a row
    assert max(peak for peak, _, _ in found) < BUDGET + (32 << 20)
