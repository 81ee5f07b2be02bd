"""How ranks that can gather small objects meet: where each runs, and rank 0's store.

Rank 0 listens on a port assigned by the system and publishes the address. Spark's own way,
``BarrierTaskContext.allGather``, polls once a second.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Store, TCPStore

from sparkdl.collective.network import Network, interface_of, listen, local_address
from sparkdl.errors import ConfigError

Gather = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""Hands every rank what all ranks gave, in rank order; has its own deadline."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """What a rank knows once all have met.

    Attributes:
        rank: this one.
        hosts: where each rank runs, by rank.
        address: this rank's own address on the chosen interface.
        master: address and port at which rank 0 accepts the others.
        store: rank 0's store; None on other ranks, which connect to ``master``.
    """

    rank: int
    hosts: tuple[str, ...]
    address: str
    master: tuple[str, int]
    store: Store | None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.hosts)

    @property
    def local_rank(self) -> int:
        """This rank's position among those of its host."""
        return self.hosts[: self.rank].count(self.hosts[self.rank])

    @property
    def local_world_size(self) -> int:
        """Number of ranks on this host."""
        return self.hosts.count(self.hosts[self.rank])


def meet(
    rank: int,
    gather: Gather,
    *,
    device: torch.device | str,
    network: Network,
    timeout: timedelta,
) -> Meeting:
    """Tell all other ranks where this one runs, and learn where they run.

    Args:
        rank: this one.
        gather: how the ranks find each other.
        device: what this rank computes on.
        network: interface and ports.
        timeout: how long an operation on rank 0's store may take.

    Raises:
        ConfigError: the interface or ports are not available, or two ranks use one GPU.
    """
    address = local_address(network)
    mine: dict[str, Any] = {
        "host": network.host or socket.gethostname(),
        "device": str(device),
        "gpu": _gpu_of(torch.device(device)),
    }
    store = None
    if rank == 0:
        store, mine["port"] = _open_store(address, network.ports, timeout)
        mine["address"] = address
    found = gather(mine)
    require_distinct_gpus([(str(each["host"]), str(each["device"]), each["gpu"]) for each in found])
    return Meeting(
        rank=rank,
        hosts=tuple(str(each["host"]) for each in found),
        address=address,
        master=(str(found[0]["address"]), int(found[0]["port"])),
        store=store,
    )


def _gpu_of(device: torch.device) -> str | None:
    """Identifies a GPU whatever its index in a process; None for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def require_distinct_gpus(places: Sequence[tuple[str, str, str | None]]) -> None:
    """Check that every rank has its own GPU; otherwise NCCL would fail with an obscure message.

    Args:
        places: host and device of each rank, and the UUID of its GPU if it has one.

    Raises:
        ConfigError: two ranks use the same GPU.
    """
    taken: dict[str, int] = {}
    for rank, (host, device, gpu) in enumerate(places):
        if gpu is None:
            continue
        if gpu in taken:
            raise ConfigError(
                f"ranks {taken[gpu]} and {rank} on {host} both use {device} (GPU {gpu}). Let Spark "
                "assign a GPU to each (spark.task.resource.gpu.amount), or set numWorkers to the "
                "number of GPUs"
            )
        taken[gpu] = rank


def _open_store(
    address: str, ports: tuple[int, int] | None, timeout: timedelta
) -> tuple[Store, int]:
    """Start the store through which a group forms; returns it with its port."""
    with listen(address, ports) as listener:
        port = listener.getsockname()[1]
        store = TCPStore(
            address,
            port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    return store, port


def interface_settings(device: torch.device, address: str) -> Mapping[str, str]:
    """Settings that make the backend bind to one interface; the user's own settings win."""
    name = "NCCL_SOCKET_IFNAME" if device.type == "cuda" else "GLOO_SOCKET_IFNAME"
    return {} if name in os.environ else {name: interface_of(address)}
