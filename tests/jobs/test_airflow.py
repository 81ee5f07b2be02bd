"""The Airflow DAG, loaded by Airflow's own DagBag in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

AIRFLOW = "3.3.2"
CONSTRAINTS = (
    f"https://raw.githubusercontent.com/apache/airflow/constraints-{AIRFLOW}/"
    f"constraints-{sys.version_info.major}.{sys.version_info.minor}.txt"
)
ROOT = Path(__file__).parents[2]
INSTALL_S = 900


@pytest.fixture(scope="module")
def airflow_python(request: pytest.FixtureRequest) -> Path:
    """A Python that has Airflow, made once and kept in pytest's cache."""
    cache = request.config.cache
    python = Path(cache.mkdir(f"airflow-{AIRFLOW}")) / "bin" / "python"
    if (python.parent / "installed").exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True, timeout=120)
    install = [python, "-m", "pip", "install", "--quiet", f"apache-airflow=={AIRFLOW}"]
    try:
        with urllib.request.urlopen(CONSTRAINTS, timeout=10):
            install += ["-c", CONSTRAINTS]
    except (urllib.error.URLError, TimeoutError):
        pass  # a package mirror without the rest of the network: the newest that fit
    done = subprocess.run(install, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode:
        pytest.skip(f"apache-airflow=={AIRFLOW} cannot be installed: {done.stderr[-500:]}")
    (python.parent / "installed").touch()
    return python


@pytest.mark.nightly
@pytest.mark.timeout(INSTALL_S + 300)
def test_airflow_loads_the_pipeline_and_its_tasks_end_as_the_jobs_do(
    airflow_python: Path, tmp_path: Path
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"AIRFLOW_HOME": f"{tmp_path}/home", "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
    (scratch := tmp_path / "scratch").mkdir()
    checks, dags = Path(__file__).with_name("airflow_checks.py"), ROOT / "deploy" / "airflow"
    done = subprocess.run(
        [airflow_python, checks, dags, scratch],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["errors"] == {}
    assert found["dags"] == ["sparkdl_flights"]
    assert found["order"] == {"train": ["evaluate"], "evaluate": ["predict"], "predict": []}
    assert set(found["templates"].values()) == {"{{ run_id }}"}
    assert found["retries"] == [3, 3, 3]
    # Wrong configurations are not tried again; what may pass is.
    assert found["ends"]["0"] == "told"
    assert found["ends"]["2"].startswith("AirflowFailException: train.py ended with exit code 2")
    for code in ("6", "75"):
        expected = f"AirflowException: train.py ended with exit code {code}: this is why"
        assert found["ends"][code] == expected
    # Whatever a run is called, no shell reads it.
    assert "--run_id=; touch /tmp/no" in found["arguments"]
    assert found["arguments"][0] == "jobs/train.py"
