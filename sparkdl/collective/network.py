"""This host's addresses and ports as other workers use them, and ending connections to them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import socket
import stat
import struct
from collections.abc import Collection
from dataclasses import dataclass

from sparkdl.errors import ConfigError

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


def listen(address: str, ports: tuple[int, int] | None) -> socket.socket:
    """Listen on an address; the port stays bound, so nobody can take it before it is used.

    Args:
        address: one of this host's.
        ports: first and last port to try; None for any free one.

    Raises:
        ConfigError: every port of the range is taken.
    """
    if ports is None:
        return socket.create_server((address, 0))
    for port in range(ports[0], ports[1] + 1):
        try:
            return socket.create_server((address, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise ConfigError(
        f"every port from {ports[0]} to {ports[1]} is taken on {address} "
        f"({socket.gethostname()}). Widen collectivePorts (spark.sparkdl.collective.ports)"
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
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as found:
                    _hang_up(found, keep)


def _hang_up(connection: socket.socket, keep: Collection[int]) -> None:
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    ports = {connection.getsockname()[1], connection.getpeername()[1]}
    if not ports & set(keep):
        connection.shutdown(socket.SHUT_WR)
