"""Executors that may connect to Spark's own ports of the driver, and to one more."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import train_on_hosts
from connecting import client
from hosts import MASTER_PORT, Cluster, Hosts, reason_not_to
from pyspark.sql import SparkSession
from waiting import eventually

reason = reason_not_to()
pytestmark = [
    pytest.mark.skipif(reason is not None, reason=str(reason)),
    # They wait, and need sessions of their own.
    pytest.mark.nightly,
]
SERVER = """
import time
from sparkdl import create_session
create_session("a server")
time.sleep(600)
"""
RPC, BLOCKS, OF_WORKER, OF_EXECUTOR, CONNECT, OF_FITS = range(40001, 40007)
CONF: dict[str, str | None] = {
    "spark.driver.port": str(RPC),
    "spark.driver.blockManager.port": str(BLOCKS),
    "spark.blockManager.port": str(OF_EXECUTOR),
    "spark.executor.memory": "512m",
}


@contextlib.contextmanager
def cluster_behind_a_policy(hosts: Hosts, cores: int = 1) -> Iterator[Cluster]:
    for host in hosts.hosts:
        host.allow(
            hosts.gateway, to=(MASTER_PORT, RPC, BLOCKS, OF_FITS), of=(OF_WORKER, OF_EXECUTOR)
        )
    with Cluster(hosts, cores=cores, variables={"SPARK_WORKER_PORT": str(OF_WORKER)}) as cluster:
        yield cluster


def connects(address: str) -> bool:
    try:
        socket.create_connection((address, CONNECT), timeout=5).close()
    except OSError:
        return False
    return True


@pytest.mark.timeout(400)
def test_a_driver_that_is_reached_at_one_port_alone_serves_fits_there(tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    with Hosts(2, tmp_path) as hosts, cluster_behind_a_policy(hosts) as cluster:
        for port, conf in {"any": {}, "one": {"spark.sparkdl.driver.port": str(OF_FITS)}}.items():
            output = tmp_path / port
            given = ["allReduce=true", "timeout=60"]
            script = Path(__file__).parent / "train_on_hosts.py"
            driver = cluster.driver(script, str(output), *given, conf=CONF | conf)
            assert driver.wait(180) == 0
            found[port] = json.loads(output.read_text())
    assert "cannot reach the averager at tcp://" in found["any"]["error"], found
    assert found["one"].get("examples") == [60], found


@pytest.mark.timeout(400)
def test_a_client_that_reaches_nothing_but_the_port_of_spark_connect_gets_the_bits_of_a_driver(
    spark: SparkSession, tmp_path: Path
) -> None:
    script = tmp_path / "serve.py"
    script.write_text(SERVER)
    serving = {
        "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
        "spark.connect.grpc.binding.port": str(CONNECT),
    }
    with Hosts(3, tmp_path) as hosts:
        notebook = hosts.hosts.pop()  # runs nothing of the cluster's
        notebook.allow(hosts.gateway, to=(CONNECT,), of=())
        for host in hosts.hosts:
            notebook.allow(host.address, to=(), of=())
        with cluster_behind_a_policy(hosts, cores=2) as cluster:
            server = cluster.driver(script, conf=CONF | serving)
            try:
                assert eventually(lambda: connects(hosts.gateway), wait_s=120)
                program = client(
                    f"sc://{hosts.gateway}:{CONNECT}", train_on_hosts.bits_of_a_fit, tmp_path
                )
                assert notebook.run([sys.executable, *program]).wait(240) == 0
            finally:
                os.killpg(server.pid, signal.SIGKILL)
    found = pickle.loads((tmp_path / "found").read_bytes())
    assert found == train_on_hosts.bits_of_a_fit(spark)
