"""Under dynamic allocation executors join a fit when they come, before its first round or later."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hosts import Cluster, Host, Hosts, reason_not_to
from test_preemption import wait_until

reason = reason_not_to()
pytestmark = [
    pytest.mark.skipif(reason is not None, reason=str(reason)),
    pytest.mark.nightly,
    pytest.mark.timeout(400),
]

EPOCHS = 12
ROWS = 120
CONF = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.minExecutors": "1",
    "spark.dynamicAllocation.maxExecutors": "2",
    "spark.executor.instances": "1",
    "spark.executor.memory": "512m",
}


def runs_a_task(host: Host) -> bool:
    lines = [Path(f"/proc/{pid}/cmdline") for pid in host.pids()]
    return any("pyspark" in path.read_text() for path in lines if path.exists())


def test_executors_that_come_later_join_the_fit_and_no_row_is_lost(tmp_path: Path) -> None:
    output, checkpoints = tmp_path / "result.json", tmp_path / "checkpoints"
    with Hosts(2, tmp_path) as hosts, Cluster(hosts) as cluster:
        first, late = hosts.hosts
        late.crash()
        driver = cluster.driver(
            Path(__file__).parent / "train_on_hosts.py",
            str(output),
            f"epochs={EPOCHS}",
            f"rows={ROWS}",
            "numWorkers=2",
            "batchSize=5",
            "sleep=0.1",
            "timeout=120.0",
            f"checkpointPath={json.dumps(str(checkpoints))}",
            conf=CONF,
            log=tmp_path / "driver.log",
        )
        try:
            wait_until(lambda: runs_a_task(first), driver)
            assert not list(checkpoints.glob("checkpoint-*"))  # it waits for the other
            cluster.boot(late)
            wait_until(lambda: list(checkpoints.glob("checkpoint-000002*")), driver)
            late.crash()
            cluster.boot(late)
            assert driver.wait(200) == 0
        finally:
            driver.kill()
    result = json.loads(output.read_text())
    assert result.get("examples") == [ROWS] * EPOCHS, result
