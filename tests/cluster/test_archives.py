"""Environments sent to the hosts of a cluster by spark.archives, as docs/deploy.md tells to."""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from environments import make_environment, pack
from hosts import Cluster, Hosts, reason_not_to

reason = reason_not_to()
pytestmark = [pytest.mark.skipif(reason is not None, reason=str(reason)), pytest.mark.nightly]

SCRIPT = Path(__file__).parent / "train_from_archive.py"
# Every host gets a copy of the archive, and unpacks it, before its first task begins.
DRIVER_S = 400


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Two hosts, whose gigabytes of unpacked archives go with them."""
    with Hosts(2, tmp_path) as made:
        yield made
    for folder in ("work", "local"):
        for host in made.hosts:
            shutil.rmtree(host.folder / folder, ignore_errors=True)


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Path]:
    """An environment with sparkdl, and beside it ``environment.tar.gz``."""
    made = make_environment(tmp_path)
    pack(made, tmp_path / "environment.tar.gz")
    yield made
    shutil.rmtree(made)
    (tmp_path / "environment.tar.gz").unlink()


def train(hosts: Hosts, folder: Path, driver_python: Path, **variables: str) -> dict[str, Any]:
    """What ``train_from_archive.py`` found on the hosts, with an archive beside ``folder``."""
    folder.mkdir()
    variables["PYSPARK_PYTHON"] = "./environment/bin/python"
    variables["PYSPARK_DRIVER_PYTHON"] = str(driver_python)
    archive = folder.parent / "environment.tar.gz"
    conf = {"spark.executor.memory": "512m", "spark.archives": f"{archive}#environment"}
    with Cluster(hosts, variables=variables) as cluster:
        driver = cluster.driver(SCRIPT, str(folder), conf=conf)
        assert driver.wait(DRIVER_S) == 0
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


@pytest.mark.timeout(900)
def test_what_is_fitted_and_predicted_on_each_host_comes_from_the_archive(
    hosts: Hosts, environment: Path, tmp_path: Path
) -> None:
    # No host has the checkout, as on a cluster where nothing is installed.
    seen = tmp_path / "seen"
    result = train(hosts, seen, environment / "bin" / "python", PYTHONPATH="")
    assert "error" not in result, result["error"]
    assert result["driver"] == str(environment)
    assert result["worst"] < 0.05  # the label is a line, which least squares finds
    for host in hosts.hosts:
        fitted = json.loads((seen / f"fit {host.name}.json").read_text())
        unpacked = Path(fitted["prefix"])
        assert unpacked.is_relative_to(host.folder / "work"), fitted
        assert unpacked.name == "environment"
        assert not list(unpacked.glob("lib/*/site-packages/pyspark"))  # the cluster's
        assert all(Path(path).is_relative_to(unpacked) for path in fitted.values()), fitted
    # Spark may give both tasks of a prediction to one host.
    predicted = [json.loads(path.read_text()) for path in seen.glob("transform worker-*.json")]
    assert predicted
    folders = {json.loads(path.read_text())["prefix"] for path in seen.glob("fit worker-*.json")}
    for found in predicted:
        assert found["prefix"] in folders
        assert all(Path(path).is_relative_to(found["prefix"]) for path in found.values()), found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("lacks", ["a folder of that name", "the Python it links to"])
def test_an_archive_without_an_interpreter_is_named_with_the_fix(
    hosts: Hosts, tmp_path: Path, lacks: str
) -> None:
    packed = tmp_path / "packed" / "bin"
    packed.mkdir(parents=True)
    if lacks == "the Python it links to":
        (packed / "python").symlink_to("/nowhere/bin/python3.11")
    with tarfile.open(tmp_path / "environment.tar.gz", "w:gz") as archive:
        archive.add(packed.parent, arcname=".")
    error = train(hosts, tmp_path / "seen", Path(sys.executable))["error"]
    assert error.startswith("SetupError: the executor on ")
    assert "cannot start the Python that PYSPARK_PYTHON names, ./environment/bin/python" in error
    assert "spark.archives" in error
    assert "#environment" in error
    assert "conda-pack" in error
