"""Executors that may connect to Spark's own ports of the driver, and to no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hosts import MASTER_PORT, Cluster, Hosts, reason_not_to

reason = reason_not_to()
pytestmark = [
    pytest.mark.skipif(reason is not None, reason=str(reason)),
    # They wait, and need sessions of their own.
    pytest.mark.slow,
    pytest.mark.nightly,
]
RPC, BLOCKS, OF_WORKER, OF_EXECUTOR = 40001, 40002, 40003, 40004
CONF: dict[str, str | None] = {
    "spark.driver.port": str(RPC),
    "spark.driver.blockManager.port": str(BLOCKS),
    "spark.blockManager.port": str(OF_EXECUTOR),
    "spark.executor.memory": "512m",
}


@pytest.mark.timeout(400)
def test_a_driver_that_cannot_be_reached_trains_with_its_averager_on_an_executor(
    tmp_path: Path,
) -> None:
    found: dict[str, Any] = {}
    with Hosts(2, tmp_path) as hosts:
        for host in hosts.hosts:
            host.allow(hosts.gateway, to=(MASTER_PORT, RPC, BLOCKS), of=(OF_WORKER, OF_EXECUTOR))
        with Cluster(hosts, variables={"SPARK_WORKER_PORT": str(OF_WORKER)}) as cluster:
            for where in ("driver", "executor"):
                output = tmp_path / where
                given = ["allReduce=true", "timeout=60", f'averagerHost="{where}"']
                script = Path(__file__).parent / "train_on_hosts.py"
                driver = cluster.driver(script, str(output), *given, conf=CONF)
                assert driver.wait(180) == 0
                found[where] = json.loads(output.read_text())
    assert "cannot reach the averager at tcp://" in found["driver"]["error"], found
    assert found["executor"].get("examples") == [60], found
