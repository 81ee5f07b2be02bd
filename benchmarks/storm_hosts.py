"""The part of the chaos benchmark on several hosts, which as a whole are cut off, paused or crash.

The hosts are network namespaces of this machine with a Spark standalone cluster on them
(``tests/cluster/hosts.py``); they need root.
"""

import random
import sys
import tempfile
import time
from pathlib import Path

from storm_executors import CONF, WORKERS, jobs_under_faults, start_session
from storms import Ended

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "cluster"))
from hosts import Cluster, Host, Hosts, reason_not_to

SILENT_S = 16.0
"""The longest that a host is cut off or paused."""
HOST_CONF = {
    # Makes Spark give up some of the executors that are cut off, while others come back.
    "spark.network.timeout": "12s",
    "spark.network.timeoutInterval": "4s",
    "spark.executor.heartbeatInterval": "2s",
    "spark.executor.instances": str(WORKERS),
    "spark.executor.cores": "1",
    "spark.cores.max": str(WORKERS),
}


def run_part(seed: int, faults: int) -> list[Ended] | str:
    """Run jobs until ``faults`` faults were injected, or say why there can be no hosts here."""
    reason = reason_not_to()
    if reason is not None:
        return reason
    with (
        tempfile.TemporaryDirectory() as folder,
        Hosts(WORKERS, Path(folder)) as hosts,
        Cluster(hosts) as cluster,
    ):
        gateway = hosts.gateway
        address = {"spark.driver.host": gateway, "spark.driver.bindAddress": gateway}
        spark = start_session(cluster.master, CONF | HOST_CONF | address)
        deeds = HostFaults(cluster)
        try:
            return jobs_under_faults(
                spark,
                "hosts",
                seed,
                faults,
                host=gateway,
                more=[deeds.cut, deeds.cut, deeds.pause, deeds.crash],
                every_s=1.5,
            )
        finally:
            spark.stop()


class HostFaults:
    """What can happen to whole hosts.

    Args:
        cluster: the cluster on the hosts.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def cut(self, generator: random.Random) -> str:
        """Cut a host off for a while: packets vanish without notice."""
        host, seconds = self._pick(generator)
        host.cut()
        time.sleep(seconds)
        host.mend()
        return f"cut {host.name} off for {seconds:.1f} s"

    def pause(self, generator: random.Random) -> str:
        """Stop everything that runs on a host for a while."""
        host, seconds = self._pick(generator)
        host.pause()
        time.sleep(seconds)
        host.resume()
        return f"pause {host.name} for {seconds:.1f} s"

    def crash(self, generator: random.Random) -> str:
        """Kill everything that runs on a host at once, and restart Spark's worker there."""
        host, _ = self._pick(generator)
        host.crash()
        self._cluster.boot(host)
        return f"crash {host.name}"

    def _pick(self, generator: random.Random) -> tuple[Host, float]:
        host = generator.choice(self._cluster.hosts.hosts)
        return host, generator.uniform(0.5, SILENT_S)
