"""A whole host is lost in the middle of a fit on a standalone cluster of three."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts import Cluster, Hosts, reason_not_to
from models import lines
from test_preemption import wait_until

reason = reason_not_to()
pytestmark = [
    pytest.mark.skipif(reason is not None, reason=str(reason)),
    pytest.mark.nightly,
    pytest.mark.timeout(400),
]

EPOCHS = 12
ROWS = 180


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Hosts(3, tmp_path) as hosts, Cluster(hosts) as made:
        yield made


def fit_while(
    cluster: Cluster,
    folder: Path,
    deed: Callable[[], None],
    *params: str,
    until: Callable[[], bool],
) -> dict[str, Any]:
    """Fit on the three hosts, with a deed once it is time."""
    output = folder / "result.json"
    driver = cluster.driver(
        Path(__file__).parent / "train_on_hosts.py",
        str(output),
        f"epochs={EPOCHS}",
        f"rows={ROWS}",
        "numWorkers=3",
        "batchSize=5",
        *params,
        conf={
            "spark.executor.memory": "512m",
            "spark.network.timeout": "60s",
            "spark.executor.heartbeatInterval": "5s",
        },
        log=folder / "driver.log",
    )
    try:
        wait_until(until, driver)
        deed()
        assert driver.wait(250) == 0
    finally:
        driver.kill()
    return json.loads(output.read_text())


def fit_checkpointed_while(
    cluster: Cluster, folder: Path, deed: Callable[[], None]
) -> dict[str, Any]:
    """As above, with the deed once checkpoints say that training is under way."""
    checkpoints = folder / "checkpoints"
    params = ["sleep=0.1", f"checkpointPath={json.dumps(str(checkpoints))}"]
    second = checkpoints / "checkpoint-000002.safetensors"
    return fit_while(cluster, folder, deed, *params, until=second.exists)


def test_a_host_that_crashes_is_replaced_and_no_row_is_lost(
    cluster: Cluster, tmp_path: Path
) -> None:
    host = cluster.hosts.hosts[1]

    def crash() -> None:
        host.crash()
        time.sleep(2)
        cluster.boot(host)

    result = fit_checkpointed_while(cluster, tmp_path, crash)
    assert result.get("examples") == [ROWS] * EPOCHS, result


@pytest.mark.parametrize("deed", ["pause", "cut"])
def test_a_host_that_is_silent_for_a_while_comes_back_and_no_row_is_lost(
    cluster: Cluster, tmp_path: Path, deed: str
) -> None:
    host = cluster.hosts.hosts[2]

    def be_silent() -> None:
        getattr(host, deed)()
        time.sleep(25)
        (host.resume if deed == "pause" else host.mend)()

    result = fit_checkpointed_while(cluster, tmp_path, be_silent)
    assert result.get("examples") == [ROWS] * EPOCHS, result


@pytest.mark.parametrize("all_reduce", ["false", "true"])
def test_a_host_that_is_cut_off_while_its_worker_starts_is_waited_for(
    cluster: Cluster, tmp_path: Path, all_reduce: str
) -> None:
    announced = tmp_path / "announced"
    host = cluster.hosts.hosts[0]

    def cut() -> None:
        host.cut()
        time.sleep(12)
        host.mend()

    params = [f"announce={json.dumps(str(announced))}", f"allReduce={all_reduce}", "maxFailures=0"]
    result = fit_while(cluster, tmp_path, cut, *params, until=lambda: len(lines(announced)) == 3)
    assert result.get("examples") == [ROWS] * EPOCHS, result
