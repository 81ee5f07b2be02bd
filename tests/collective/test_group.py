"""Groups of workers: their operations, their network, and how they end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from every_row import every
from open_files import open_files
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel

from sparkdl.collective import Collective, Network, join_collective, release_model
from sparkdl.collective.network import local_address
from sparkdl.errors import CollectiveError, ConfigError
from sparkdl.transport.sockets import listen

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def alone(**changes: Any) -> Any:
    """A group of one, in this process."""
    settings = {"device": "cpu", "deadline_s": 120.0}
    return join_collective(0, lambda value: [value], **{**settings, **changes})


@every("world_size", [1, 2, 3])
def test_tensors_are_added_over_all_ranks_and_sent_from_one(world_size: int) -> None:
    def body(collective: Collective, _: Any) -> Any:
        mine = torch.full((5,), float(collective.rank + 1), dtype=torch.float64)
        total = collective.all_reduce(mine.clone())
        return total.tolist(), collective.broadcast(mine, world_size - 1).tolist()

    results = run_ranks(world_size, body)

    total = world_size * (world_size + 1) / 2
    assert results == [([total] * 5, [float(world_size)] * 5)] * world_size


def test_every_rank_knows_its_place() -> None:
    def body(collective: Collective, _: Any) -> Any:
        collective.all_reduce(torch.zeros(1))  # who left before would break the others' joining
        return (
            (collective.rank, collective.world_size),
            (collective.meeting.local_rank, collective.meeting.local_world_size),
            collective.meeting.master,
            dist.get_rank(),
            dist.get_backend(),
        )

    results = run_ranks(3, body)

    masters = {result[2] for result in results}
    assert len(masters) == 1, "they do not agree where rank 0 is"
    assert masters.pop()[0] == "127.0.0.1"
    for rank, (place, on_host, _, in_torch, backend) in enumerate(results):
        assert place == on_host == (rank, 3)
        assert (in_torch, backend) == (rank, "gloo")


def test_it_listens_on_the_chosen_interface_only() -> None:
    def listening() -> set[str]:
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        mine = set(open_files())
        return {r[1].split(":")[0] for r in rows if r[3] == "0A" and f"socket:[{r[9]}]" in mine}

    def body(collective: Collective, _: Any) -> Any:
        collective.all_reduce(torch.ones(1))
        return listening()

    assert run_ranks(2, body) == [{"0100007F"}, {"0100007F"}]


@pytest.mark.nightly_variants
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_killed_in_an_all_reduce_is_named_by_the_others(victim: int) -> None:
    def body(collective: Collective, _: Any) -> Any:
        for step in range(1000):
            if collective.rank == victim and step == 20:
                threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
            collective.all_reduce(torch.ones(200_000))
            if step >= 20:
                time.sleep(0.01)
        return None

    results = run_ranks(3, body)

    assert results[victim] == ("killed", -signal.SIGKILL)
    for rank, result in enumerate(results):
        if rank != victim:
            assert result[0] == "error"
            told = f"CollectiveError: an all-reduce among 3 workers failed on rank {rank}"
            for words in (told, f"rank {victim} on ", "did not take part"):
                assert words in result[1]


@pytest.mark.nightly
def test_a_rank_that_hangs_is_named_by_the_others_after_the_deadline(tmp_path: Path) -> None:
    def body(collective: Collective, _: Any) -> Any:
        collective.all_reduce(torch.ones(4))
        if collective.rank == 1:
            until = time.monotonic() + 240
            while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < until:
                time.sleep(0.1)
            return "woke up"
        started = time.monotonic()
        try:
            collective.all_reduce(torch.ones(4))
        finally:
            assert time.monotonic() - started < 120
            (tmp_path / str(collective.rank)).touch()
        return None

    results = run_ranks(3, body, deadline_s=32.0)

    assert results[1] == "woke up"
    for rank in (0, 2):
        assert "rank 1 on " in results[rank][1]
        assert "did not take part within 24 s" in results[rank][1]


def test_an_error_of_the_users_own_passes_unchanged() -> None:
    refused = pytest.raises(RuntimeError, match=r"^mine$")
    with alone() as collective, refused, collective.guarded("anything"):
        raise RuntimeError("mine")


def threads_of_this_process() -> int:
    return len(os.listdir("/proc/self/task"))


def open_sockets() -> int:
    return sum(file.startswith("socket:") for file in open_files())


def test_a_connection_that_breaks_while_a_group_forms_is_told_of_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when another worker fails at once; gloo says so by an error of no class of its own."""

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("[/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed")

    monkeypatch.setattr(dist, "init_process_group", broken)
    with pytest.raises(CollectiveError, match=r"rank 0 on .* cannot form a group .* closed"):
        alone().__enter__()


def test_nothing_is_left_in_a_process_that_forms_one_group_after_another() -> None:
    def body(collective: Collective, gather: Any) -> Any:
        rank = collective.rank
        collective.all_reduce(torch.ones(4))
        dist.destroy_process_group()
        del collective
        found = []
        for _ in range(5):
            with join_collective(rank, gather, device="cpu", deadline_s=120.0) as again:
                again.all_reduce(torch.ones(1000))
            del again
            time.sleep(0.05)
            gather({})
            found.append((threads_of_this_process(), open_sockets(), dist.is_initialized()))
        return found, sorted(name for name in os.environ if "SOCKET_IFNAME" in name)

    for found, variables in run_ranks(2, body):
        first, last = found[0], found[-1]
        assert last[0] <= first[0], found
        # One group's socket may still be closing when the next has been counted.
        assert last[1] <= first[1] + 1, found
        assert not any(initialized for *_, initialized in found), found
        assert variables == ["GLOO_SOCKET_IFNAME"]  # the outer group's, which has not been left


@every("user_has_set", [False, True])
def test_leaving_restores_the_environment_with_what_the_user_has_set(
    monkeypatch: pytest.MonkeyPatch, user_has_set: bool
) -> None:
    if user_has_set:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    before = dict(os.environ)
    with alone():
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert dict(os.environ) == before
    assert not dist.is_initialized()


def test_a_group_left_behind_by_an_earlier_task_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with alone() as collective:
        assert float(collective.all_reduce(torch.ones(()))) == 1.0
    assert "an earlier task left a process group" in caplog.text


def test_rank_0_listens_in_the_range_of_ports_that_it_is_given() -> None:
    with listen("127.0.0.1", None, "it") as probe:
        port = probe.getsockname()[1]
    with alone(network=Network(ports=(port, port))) as collective:
        assert collective.meeting.master == ("127.0.0.1", port)
        with pytest.raises(ConfigError, match="is taken"):
            listen("127.0.0.1", (port, port), "it")


@pytest.mark.gate
def test_groups_with_a_ddp_model_end_without_waiting_for_pythons_lock() -> None:
    """Unless the model lets go of the group first, one in a few hundred hangs on a busy machine."""

    def train(rank: int, gather: Any) -> DistributedDataParallel:
        with join_collective(rank, gather, device="cpu", deadline_s=120.0):
            model = DistributedDataParallel(torch.nn.Linear(6, 3))
            for _ in range(3):
                model(torch.randn(4, 6)).sum().backward()
            release_model(model)
        return model

    def body(collective: Collective, gather: Any) -> Any:
        rank = collective.rank
        dist.barrier()  # the other rank may still be connecting to this one
        dist.destroy_process_group()
        del collective
        for _ in range(100):
            train(rank, gather)
        return "ended"

    assert run_ranks(2, body) == ["ended", "ended"]


HANGS_UP = """
import socket, sys
from sparkdl.collective.network import hang_up
kept, ended = [socket.create_connection(("127.0.0.1", int(port))) for port in sys.argv[1:]]
listener, (mine, other) = socket.create_server(("127.0.0.1", 0)), socket.socketpair()
hang_up({kept.getpeername()[1]})
kept.sendall(b"kept")
mine.sendall(b"local")
assert other.recv(9) == b"local"
socket.create_connection(listener.getsockname()).close()
sys.stdin.read()
"""


@pytest.mark.timeout(600)
def test_the_connections_to_other_ports_are_at_their_end_and_only_those() -> None:
    here = ("127.0.0.1", 0)
    with socket.create_server(here) as first, socket.create_server(here) as second:
        ports = [str(each.getsockname()[1]) for each in (first, second)]
        child = subprocess.Popen([sys.executable, "-c", HANGS_UP, *ports], stdin=subprocess.PIPE)
        with first.accept()[0] as kept, second.accept()[0] as ended:
            assert kept.recv(9) == b"kept"
            assert ended.recv(9) == b""
        assert child.poll() is None
        child.communicate(timeout=300)
        assert child.returncode == 0


@every(
    ("driver", "choice", "address"),
    [
        # without a choice, the interface that routes to the driver
        *(("127.0.0.1", None, "127.0.0.1"), ("localhost", None, "127.0.0.1")),
        ("::1", None, "::1"),
        *(("192.0.2.1", choice, "127.0.0.1") for choice in ("lo", "127.0.0.0/8", "127.0.0.1")),
    ],
)
def test_an_interface_is_chosen_by_name_subnet_or_address_or_routes_to_the_driver(
    driver: str, choice: str | None, address: str
) -> None:
    assert local_address(Network(driver=driver, interface=choice)) == address


@every("choice", ["nonsense0", "203.0.113.0/24"])
def test_an_interface_that_is_not_there_is_an_error_that_lists_those_that_are(choice: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{choice}'.*lo \(127\.0\.0\.1\)"):
        local_address(Network(interface=choice))


def test_a_port_is_held_as_soon_as_it_is_known() -> None:
    with listen("127.0.0.1", None, "it") as listener:
        port = listener.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", port))


def test_the_first_free_port_of_a_range_is_taken_and_a_full_range_is_an_error() -> None:
    host = "127.0.17.3"  # where nothing else of this machine takes the next port meanwhile
    with listen(host, None, "it") as probe:
        first = probe.getsockname()[1]
        if first >= 65_535:
            pytest.skip("the system gave the last port there is")
        with listen(host, (first, first + 1), "it") as second:
            assert second.getsockname()[1] == first + 1
            with pytest.raises(ConfigError, match=f"from {first} to {first + 1} is taken"):
                listen(host, (first, first + 1), "it")


def test_a_driver_with_addresses_of_both_kinds_is_reached_by_ipv4(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = [
        (socket.AF_INET6, socket.SOCK_DGRAM, 17, "", ("::1", 9, 0, 0)),
        (socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.0.1", 9)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    assert local_address(Network(driver="both")) == "127.0.0.1"
