"""The hosts of the multi-host tests are hosts: they can be named, cut off, paused and killed."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Cluster, Host, Hosts, reason_not_to, sweep
from waiting import eventually

reason = reason_not_to()
pytestmark = [pytest.mark.skipif(reason is not None, reason=str(reason)), pytest.mark.gate]

ECHO = """
import socket
server = socket.create_server(("0.0.0.0", 5000))
print(socket.gethostname(), socket.gethostbyname("worker-1"), flush=True)
while True:
    line, peer = server.accept()
    line.sendall(b"here")
    line.close()
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(2, tmp_path) as made:
        yield made


def answers(host: Host) -> bool:
    try:
        with socket.create_connection((host.address, 5000), timeout=0.5) as line:
            line.settimeout(0.5)
            return line.recv(4) == b"here"
    except OSError:
        return False


def refuses(host: Host) -> bool:
    try:
        socket.create_connection((host.address, 5000), timeout=2).close()
    except ConnectionRefusedError:
        return True
    return False


def serve(host: Host) -> str:
    server = host.run([sys.executable, "-c", ECHO], stdout=subprocess.PIPE)
    assert server.stdout is not None
    return server.stdout.readline().strip()


def test_a_host_has_a_name_and_knows_the_others(hosts: Hosts) -> None:
    assert serve(hosts.hosts[1]) == f"worker-2 {hosts.hosts[0].address}"
    assert eventually(lambda: answers(hosts.hosts[1]))
    assert not answers(hosts.hosts[0])


def test_a_host_that_is_cut_off_or_paused_is_silent_until_it_is_back(hosts: Hosts) -> None:
    host = hosts.hosts[0]
    serve(host)
    for leave, come_back in ((host.cut, host.mend), (host.pause, host.resume)):
        leave()
        assert not answers(host)
        assert host.pids()
        come_back()
        assert eventually(lambda: answers(host))


def test_a_host_that_crashes_refuses_at_once_and_the_others_go_on(hosts: Hosts) -> None:
    for host in hosts.hosts:
        serve(host)
    hosts.hosts[0].crash()
    assert eventually(lambda: not hosts.hosts[0].pids())
    # Linux closes a killed process's sockets after the process has left its namespace.
    assert eventually(lambda: refuses(hosts.hosts[0]))
    assert eventually(lambda: answers(hosts.hosts[1]))


def test_a_link_has_the_speed_that_it_is_given(hosts: Hosts) -> None:
    hosts.hosts[0].limit(50)
    shown = subprocess.run(["tc", "qdisc"], capture_output=True, text=True, check=True).stdout
    assert re.search(rf"sdl{os.getpid()}v1 root .*rate 50Mbit", shown)


def test_nothing_is_left_of_the_hosts_of_a_process_that_was_killed(tmp_path: Path) -> None:
    code = "import os, sys, pathlib, hosts; hosts.Hosts(1, pathlib.Path(sys.argv[1])).hosts[0].run"
    code += "(['sleep', '100']); os.kill(os.getpid(), 9)"
    dead = subprocess.Popen([sys.executable, "-c", code, tmp_path], cwd=Path(__file__).parent)
    dead.wait(30)
    mark = f"sdl{dead.pid}"
    assert mark in subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout
    sweep()
    for command in (["ip", "link"], ["ip", "netns"]):
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert mark not in shown


UNCOUNTED = {"spark.executor.instances": None, "spark.executor.cores": None}


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "promise", [{}, UNCOUNTED, {**UNCOUNTED, "spark.cores.max": None}], ids=["all", "cores", "none"]
)
def test_a_model_is_trained_on_two_hosts_whatever_is_said_of_executors(
    hosts: Hosts, tmp_path: Path, promise: dict[str, str | None]
) -> None:
    """Without a number of workers: on all slots, so on both executors, which are just starting."""
    output = tmp_path / "result.json"
    script = Path(__file__).parent / "train_on_hosts.py"
    with Cluster(hosts) as cluster:
        driver = cluster.driver(
            script,
            str(output),
            "epochs=3",
            "numWorkers=null",
            conf={"spark.executor.memory": "512m", **promise},
        )
        assert driver.wait(200) == 0
    result = json.loads(output.read_text())
    assert result.get("examples") == [60, 60, 60], result
    # Of two workers with three minibatches each; one alone would have three.
    assert result["rounds"] == [2, 2, 2]
