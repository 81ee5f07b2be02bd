"""One exchange of rows among row servers in threads of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparkdl.feed.partition_store import PartitionStore
from sparkdl.protocols import ColumnSpec
from sparkdl.reshuffle import RowExchange, RowServer
from sparkdl.reshuffle.exchange import Everyone

SEED = 5
Columns = Callable[[Tensor], list[Any]]
"""The columns of rows, by their ids."""


def part(
    rank: int,
    server: RowServer,
    everyone: Callable[[], Everyone],
    specs: tuple[ColumnSpec, ...],
    **changes: Any,
) -> Any:
    settings = {"token": "secret", "seed": SEED, "deadline_s": 60.0, **changes}
    return RowExchange(rank=rank, server=server, everyone=everyone, specs=specs, **settings)


def by_rank(sizes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Of workers that have read one partition each, the one with their number."""
    return [[part] for part in enumerate(sizes)]


def whole(store: PartitionStore) -> list[Any]:
    """Its columns."""
    return store.take(torch.arange(store.rows))


def exchanged(
    directory: Path,
    sizes: Sequence[int],
    specs: tuple[ColumnSpec, ...],
    columns_of: Columns,
    *,
    known: tuple[ColumnSpec, ...] | None = None,
    orders: Sequence[Tensor] | None = None,
    tls: bool = False,
) -> list[list[Any]]:
    """The columns of each rank after an exchange of so many rows, numbered through all ranks."""
    starts = np.cumsum([0, *sizes])
    with ExitStack() as stack:
        servers = [
            stack.enter_context(RowServer("127.0.0.1", "secret", 20.0, tls=tls)) for _ in sizes
        ]
        everyone = Everyone(by_rank(sizes), [server.address for server in servers])

        def exchange(rank: int) -> list[Any]:
            old, new = (PartitionStore(directory) for _ in range(2))
            ids = torch.arange(starts[rank], starts[rank + 1])
            order = orders[rank] if orders else None
            if order is not None:
                ids = ids[torch.argsort(order)]  # so that ``order`` puts them right
            if len(ids):
                old.append(known or specs, columns_of(ids))
            part(rank, servers[rank], lambda: everyone, specs, tls=tls)(old, order, new, 2)
            columns = whole(new)
            new.close()
            return columns

        with ThreadPoolExecutor(len(sizes)) as pool:
            return list(pool.map(exchange, range(len(sizes)), timeout=60))
