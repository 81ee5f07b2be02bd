"""Several hosts on one machine: network namespaces, and a Spark standalone cluster on them.

Every host is a namespace with an address, a name and a link of its own to a bridge; what runs on it
can be killed, paused or cut off, as a rack would. The machine itself is the host of the driver.
It needs root, and the programs ``ip``, ``tc`` and ``unshare`` of iproute2 and util-linux.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pyspark.find_spark_home import _find_spark_home

PREFIX = "sdl"
"""Begins the names of namespaces and interfaces, before the process that made them."""
START_S = 90.0
END_S = 10.0
MASTER_PORT = 7077


def reason_not_to() -> str | None:
    """Why there can be no hosts on this machine; None if there can."""
    if os.geteuid():
        return "network namespaces need root"
    missing = [program for program in ("ip", "tc", "unshare") if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} not found (iproute2, util-linux)"
    probe = f"{PREFIX}{os.getpid()}probe"
    try:
        _ip("netns", "add", probe)
        _ip("link", "add", f"{PREFIX}probe", "type", "bridge")
        _ip("link", "del", f"{PREFIX}probe")
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed here: {error.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return None


class Host:
    """One host; made by ``Hosts``.

    Attributes:
        name: its host name.
        address: its IPv4 address.
        namespace: that of its network.
        link: the interface of this machine at the other end of its link.
    """

    def __init__(self, name: str, address: str, namespace: str, outer: str, folder: Path) -> None:
        self.name = name
        self.address = address
        self.folder = folder
        self.namespace = namespace
        self.link = outer
        self._programs: list[subprocess.Popen[str]] = []

    def run(self, command: Sequence[str | Path], **options: object) -> subprocess.Popen[str]:
        """Start a program on the host.

        Args:
            command: the program and its arguments.
            **options: for ``subprocess.Popen``.
        """
        enter = f"hostname {self.name} && mount --bind {self.folder.parent}/hosts /etc/hosts"
        wrapped = ["ip", "netns", "exec", self.namespace, "unshare", "--uts"]
        wrapped += ["sh", "-c", f'{enter} && exec "$@"', "sh", *map(str, command)]
        program = subprocess.Popen(wrapped, text=True, **options)  # type: ignore[call-overload]
        self._programs.append(program)
        return program  # type: ignore[no-any-return]

    def end(self) -> None:
        """Wait for the programs, which have been killed."""
        for program in self._programs:
            program.wait(END_S)
            for stream in (program.stdin, program.stdout, program.stderr):
                if stream is not None:
                    stream.close()

    def pids(self) -> list[int]:
        """The processes that run on the host."""
        return [int(line) for line in _ip("netns", "pids", self.namespace).split()]

    def crash(self) -> None:
        """Kill everything on the host at once; the link stays up, so that others are told."""
        self._signal(signal.SIGKILL)

    def pause(self) -> None:
        """Stop everything on the host without a word."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let what was paused go on."""
        self._signal(signal.SIGCONT)

    def cut(self) -> None:
        """Unplug the host: packets vanish, and nobody is told."""
        _ip("link", "set", self.link, "down")

    def mend(self) -> None:
        """Plug the host in again."""
        _ip("link", "set", self.link, "up")

    def allow(self, address: str, *, to: Sequence[int], of: Sequence[int]) -> None:
        """Let the host connect to some ports of an address alone.

        Args:
            address: the other's.
            to: the ports.
            of: ports of this host to which the other may connect.
        """
        rule = ["-n", self.namespace, "rule", "add", "to", address, "ipproto", "tcp"]
        for port in to:
            _ip(*rule, "dport", str(port), "lookup", "main", "prio", "10")
        for port in of:
            _ip(*rule, "sport", str(port), "lookup", "main", "prio", "10")
        _ip(*rule, "prohibit", "prio", "20")

    def limit(self, mbit: float, burst_kb: int = 256) -> None:
        """Give the link a speed, in each direction.

        Args:
            mbit: megabits a second.
            burst_kb: kilobytes that a link which was idle lets through at once.
        """
        rate = ["root", "tbf", "rate", f"{mbit}mbit", "burst", f"{burst_kb}kb", "latency", "50ms"]
        _run("tc", "qdisc", "replace", "dev", self.link, *rate)
        inner = ["ip", "netns", "exec", self.namespace, "tc", "qdisc", "replace", "dev", "eth0"]
        _run(*inner, *rate)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


class Hosts:
    """Some hosts on one bridge; a context manager that takes all of it down again.

    Args:
        count: how many hosts.
        folder: for their files, one folder a host.

    Attributes:
        hosts: ``worker-1``, ``worker-2``, ...
        gateway: the address at which the hosts reach this machine.
    """

    def __init__(self, count: int, folder: Path) -> None:
        sweep()
        mark = f"{PREFIX}{os.getpid()}"
        self._bridge = f"{mark}b"
        network = f"10.213.{os.getpid() % 250}"
        self.gateway = f"{network}.1"
        self.hosts: list[Host] = []
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("addr", "add", f"{self.gateway}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for number in range(1, count + 1):
                self.hosts.append(self._add(number, mark, f"{network}.{number + 1}", folder))
        except BaseException:
            self.close()
            raise
        known = [f"{host.address} {host.name}" for host in self.hosts]
        lines = ["127.0.0.1 localhost", f"{self.gateway} driver", *known]
        (folder / "hosts").write_text("\n".join(lines) + "\n")

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill everything on the hosts and remove them."""
        sweep(os.getpid())
        for host in self.hosts:
            host.end()

    def _add(self, number: int, mark: str, address: str, folder: Path) -> Host:
        name, namespace, outer = f"worker-{number}", f"{mark}n{number}", f"{mark}v{number}"
        home = folder / name
        home.mkdir(parents=True, exist_ok=True)
        _ip("netns", "add", namespace)
        peer = ["peer", "name", "eth0", "netns", namespace]
        _ip("link", "add", outer, "type", "veth", *peer)
        _ip("link", "set", outer, "master", self._bridge, "up")
        _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", namespace, "link", "set", "eth0", "up")
        _ip("-n", namespace, "link", "set", "lo", "up")
        return Host(name, address, namespace, outer, home)


class Cluster:
    """A Spark standalone cluster: the master on this machine, a worker on every host.

    Args:
        hosts: where the workers run.
        cores: of each worker.
        memory_mb: of each worker, in MiB, for executors.
        variables: of the environment of workers and drivers, instead of those that let them run
            this Python and this checkout.
    """

    def __init__(
        self,
        hosts: Hosts,
        *,
        cores: int = 1,
        memory_mb: int = 1024,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.hosts = hosts
        self._variables = dict(variables or {})
        self._cores = cores
        self._resources = ["--cores", str(cores), "--memory", f"{memory_mb}m"]
        self._home = Path(_find_spark_home())
        self._folder = hosts.hosts[0].folder.parent
        self._master: subprocess.Popen[str] | None = None

    @property
    def master(self) -> str:
        """The URL for ``spark.master``."""
        return f"spark://{self.hosts.gateway}:{MASTER_PORT}"

    def __enter__(self) -> Cluster:
        ports = ["--port", str(MASTER_PORT), "--webui-port", "0"]
        command = [*self._daemon("master.Master"), "--host", self.hosts.gateway, *ports]
        log = self._folder / "master.log"
        with log.open("w") as file:
            self._master = subprocess.Popen(
                command, env=self._environment(), stdout=file, stderr=file, text=True
            )
        try:
            _wait_for(log, "New state: ALIVE")
            logs = [self._start(host) for host in self.hosts.hosts]
            for path in logs:
                _wait_for(path, "Successfully registered with master")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the master; the hosts' own end is ``Hosts.close``."""
        if self._master is not None:
            self._master.kill()
            self._master.wait(END_S)

    def boot(self, host: Host) -> None:
        """Start Spark's worker on a host again, after a crash."""
        _wait_for(self._start(host), "Successfully registered with master")

    def driver(
        self,
        script: Path,
        *arguments: str,
        conf: dict[str, str | None],
        log: Path | None = None,
        **options: object,
    ) -> subprocess.Popen[str]:
        """Start a driver on this machine, in a session and process group of its own.

        Args:
            script: a Python file; it gets its session with ``create_session()``.
            *arguments: handed to the script.
            conf: further Spark settings; None leaves one out.
            log: where its standard error goes; None for that of the tests.
            **options: for ``subprocess.Popen``.
        """
        settings: dict[str, str | None] = {
            "spark.master": self.master,
            "spark.driver.host": self.hosts.gateway,
            "spark.driver.bindAddress": self.hosts.gateway,
            "spark.ui.enabled": "false",
            # What the driver waits for before it counts slots.
            "spark.executor.instances": str(len(self.hosts.hosts)),
            "spark.executor.cores": str(self._cores),
            "spark.cores.max": str(self._cores * len(self.hosts.hosts)),
            **conf,
        }
        flags = [
            part
            for key, value in settings.items()
            if value is not None
            for part in ("--conf", f"{key}={value}")
        ]
        command = [self._home / "bin" / "spark-submit", *flags, script, *arguments]
        with contextlib.ExitStack() as until_started:
            if log is not None:
                file = until_started.enter_context(log.open("w"))
                options = {"stdout": subprocess.DEVNULL, "stderr": file, **options}
            return subprocess.Popen(
                [str(part) for part in command],
                env=self._environment(),
                text=True,
                start_new_session=True,
                **options,  # type: ignore[call-overload]
            )

    def _start(self, host: Host) -> Path:
        log = host.folder / f"spark-{time.monotonic_ns()}.log"
        own = {"SPARK_LOCAL_IP": host.address, "SPARK_LOCAL_DIRS": str(host.folder / "local")}
        command = [*self._daemon("worker.Worker"), "--host", host.address, "--webui-port", "0"]
        command += ["--work-dir", str(host.folder / "work"), *self._resources, self.master]
        with log.open("w") as file:
            host.run(command, env=self._environment() | own, stdout=file, stderr=file)
        return log

    def _daemon(self, name: str) -> list[str]:
        return [str(self._home / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}"]

    def _environment(self) -> dict[str, str]:
        ours = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
        paths = [*ours, os.environ.get("PYTHONPATH", "")]
        return os.environ | {
            "SPARK_HOME": str(self._home),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_NO_DAEMONIZE": "1",
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            **self._variables,
        }


def sweep(pid: int | None = None) -> None:
    """Remove the hosts of a process, or of all processes that are gone.

    Args:
        pid: whose hosts; None for those of nobody who still runs.
    """
    listed = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=False).stdout
    for namespace in _owned(listed, pid):
        for process in _ip("netns", "pids", namespace).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        _ip("netns", "del", namespace)
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=False).stdout
    for link in _owned(links, pid):
        subprocess.run(["ip", "link", "del", link], capture_output=True, check=False)


def _owned(text: str, pid: int | None) -> Iterator[str]:
    for match in re.finditer(rf"\b{PREFIX}(\d+)[bnv]\d*\b", text):
        owner = int(match[1])
        if owner == pid or (pid is None and not Path(f"/proc/{owner}").exists()):
            yield match[0]


def _wait_for(log: Path, text: str) -> None:
    deadline = time.monotonic() + START_S
    while text not in log.read_text():
        if time.monotonic() > deadline:
            raise TimeoutError(f"'{text}' not in {log} after {START_S:g} s: {log.read_text()}")
        time.sleep(0.1)


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout
