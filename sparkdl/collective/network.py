"""The network between the ranks of a collective: how they meet there, and how they hang up.

Rank 0 listens on a port assigned by the system and publishes the address. Spark's own way,
``BarrierTaskContext.allGather``, polls once a second.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import itertools
import os
import socket
import stat
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import _rendezvous_handlers

from sparkdl.errors import ConfigError
from sparkdl.transport.sockets import listen

Gather = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""Hands every rank what all ranks gave, in rank order; has its own deadline."""

_SIOCGIFADDR = 0x8915
"""Linux's request for an interface's IPv4 address."""
_DESCRIPTORS = "/dev/fd"


@dataclass(frozen=True, kw_only=True)
class Network:
    """How the workers of a collective reach each other.

    Attributes:
        driver: a host that every worker can reach; without ``interface``, the interface that routes
            to it is used.
        interface: the name of a network interface (``eth1``), or a subnet (``10.1.0.0/16``) in
            which each host has an address; None for the route to the driver.
        ports: first and last port on which rank 0 may accept the others; None for any free one.
            The backends' own data connections use ports that the system chooses.
        host: the name of this worker's host, which tells workers on one host from others; None for
            the system's.
    """

    driver: str = "127.0.0.1"
    interface: str | None = None
    ports: tuple[int, int] | None = None
    host: str | None = None


def local_address(network: Network) -> str:
    """The address of this host on the chosen interface: IPv4, unless the driver has none.

    Raises:
        ConfigError: this host has no such interface, or no route to the driver.
    """
    if network.interface is None:
        return _address_towards(network.driver)
    addresses = interface_addresses()
    if network.interface in addresses:
        return addresses[network.interface]
    try:
        subnet = ipaddress.ip_network(network.interface, strict=False)
    except ValueError:
        subnet = None
    if subnet is not None:
        for address in addresses.values():
            if ipaddress.ip_address(address) in subnet:
                return address
    known = ", ".join(f"{name} ({address})" for name, address in addresses.items())
    raise ConfigError(
        f"no network interface of {socket.gethostname()} matches '{network.interface}'; it has "
        f"{known}. Name one of them, or a subnet in which every host has an address"
    )


def interface_addresses() -> dict[str, str]:
    """The IPv4 address of every network interface of this host that has one, by name."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError as error:
                if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
                    continue  # it has no IPv4 address, or has gone since it was listed
                raise
            addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


def interface_of(address: str) -> str:
    """The name of the interface that has an address, as the backends expect it.

    Raises:
        ConfigError: no interface has it as its first address.
    """
    addresses = interface_addresses()
    for name, mine in addresses.items():
        if mine == address:
            return name
    known = ", ".join(f"{name} ({mine})" for name, mine in addresses.items())
    raise ConfigError(
        f"no network interface of {socket.gethostname()} has {address} as its address; they are "
        f"{known}. Choose one with collectiveInterface (spark.sparkdl.collective.interface)"
    )


def _address_towards(host: str) -> str:
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        # IPv4 where there are both, because interfaces are chosen by their IPv4 addresses.
        family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing: it only looks up the route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"{socket.gethostname()} has no route to the driver at {host}: {error}"
        ) from error


def hang_up(keep: Collection[int]) -> None:
    """Shut down sending on all of this process's TCP connections, so that its peers notice.

    A process group ends its connections once nothing holds it, and that may be never: a module of
    the user's or a reference cycle may hold it. The ranks still exchanging would wait for torch's
    30 minutes. What was already sent still arrives, even if a peer goes on sending, to which a
    closed connection would respond with a reset.

    Args:
        keep: the ports, at either end, of connections that are still needed.
    """
    for descriptor in map(int, os.listdir(_DESCRIPTORS)):
        # Not a socket, only listening, or closed by now.
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6):
                    ports = {found.getsockname()[1], found.getpeername()[1]}
                    if ports.isdisjoint(keep):
                        found.shutdown(socket.SHUT_WR)


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
    with listen(address, ports, "collectivePorts (spark.sparkdl.collective.ports)") as listener:
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


def separate_groups() -> None:
    """Give each default group of this process keys of its own in the store, which outlives it.

    A group that is made after another was destroyed would find the addresses of that one.
    """
    of_environment, numbers = _rendezvous_handlers["env"], itertools.count()

    def joined(*args: Any, **kwargs: Any) -> Iterator[tuple[Store, int, int]]:
        for store, rank, world_size in of_environment(*args, **kwargs):
            yield PrefixStore(f"group {next(numbers)}", store), rank, world_size

    _rendezvous_handlers["env"] = joined


def interface_settings(device: torch.device, address: str) -> Mapping[str, str]:
    """Settings that make the backend bind to one interface; the user's own settings win."""
    name = "NCCL_SOCKET_IFNAME" if device.type == "cuda" else "GLOO_SOCKET_IFNAME"
    return {} if name in os.environ else {name: interface_of(address)}
