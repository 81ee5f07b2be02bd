"""Airflow: train, evaluate and predict once a day, each step idempotent.

Copy it to the DAGs folder, and set the two variables below in the workers' environment. Tested with
Airflow 3; tests/jobs/test_airflow.py loads it with Airflow's own DagBag.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from airflow.providers.standard.hooks.subprocess import SubprocessHook
from airflow.sdk import DAG, BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException

PROJECT = os.environ.get("SPARKDL_PROJECT", "/opt/sparkdl")
"""A checkout with jobs/ and conf/, on every Airflow worker."""
SUBMIT = os.environ.get("SPARKDL_SUBMIT", "spark-submit").split()
"""The command and its options, for example ``spark-submit --master yarn``; client mode, for in
cluster mode spark-submit does not pass on the job's exit code."""
OF_NO_USE_TO_RETRY = (2, 3, 4, 5)
"""Exit codes of docs/jobs.md: wrong configuration, data, model or installation."""


class SparkDLJob(BaseOperator):
    """Runs train.py, evaluate.py or predict.py; its result is what the task returns (XCom).

    Args:
        job: ``train``, ``evaluate`` or ``predict``.
        config: the YAML file, below the project.
        pipeline_run: the run's id, the same in each attempt; a template.
        arguments: further ones of the command line; templates.
    """

    template_fields: Sequence[str] = ("pipeline_run", "arguments")

    def __init__(
        self,
        *,
        job: str,
        config: str,
        pipeline_run: str = "{{ run_id }}",
        arguments: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.job = job
        self.config = config
        self.pipeline_run = pipeline_run
        self.arguments = list(arguments)
        self._hook = SubprocessHook()

    def execute(self, context: Any) -> dict[str, Any]:
        """Called by Airflow."""
        with tempfile.TemporaryDirectory(prefix="sparkdl-") as folder:
            result_file = Path(folder) / "result.json"
            # A list, without a shell: the run's id may be typed by whoever triggers it.
            command = [
                *SUBMIT,
                f"jobs/{self.job}.py",
                f"--config={self.config}",
                f"--run_id={self.pipeline_run}",
                f"--result_file={result_file}",
                "--log_format=json",
                *self.arguments,
            ]
            code = self._hook.run_command(command, cwd=PROJECT).exit_code
            result = json.loads(result_file.read_text()) if result_file.exists() else {}
        if code == 0:
            return dict(result)
        why = result.get("error", {}).get("message", "see the log")
        told = f"{self.job}.py ended with exit code {code}: {why}"
        raise (AirflowFailException if code in OF_NO_USE_TO_RETRY else AirflowException)(told)

    def on_kill(self) -> None:
        """Called when the task is cleared or runs out of time: the job writes a checkpoint."""
        self._hook.send_sigterm()


with DAG(
    "sparkdl_flights",
    description="Train on all flights, measure the model, predict",
    schedule="@daily",
    start_date=datetime(2026, 1, 1),
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 3, "retry_delay": timedelta(minutes=2)},
    tags=["sparkdl"],
) as dag:
    steps = [
        SparkDLJob(task_id=job, job=job, config="conf/flights.yaml")
        for job in ("train", "evaluate", "predict")
    ]
    for before, after in itertools.pairwise(steps):
        before >> after
