"""What test_airflow.py runs with Airflow's own Python; prints what it finds as JSON."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path
from typing import Any

FAKE = """#!/bin/sh
for argument in "$@"; do
  case "$argument" in
    --result_file=*) file="${argument#--result_file=}";;
    --code=*) code="${argument#--code=}";;
  esac
done
printf '%s\\n' "$@" > "$(dirname "$0")/arguments.txt"
echo '{"status": "told", "error": {"message": "this is why"}}' > "$file"
exit "${code:-0}"
"""


def main(folder: Path, scratch: Path) -> dict[str, Any]:
    """Load the DAG as Airflow does, and execute its operator against a submit command of ours."""
    from airflow.dag_processing.dagbag import DagBag

    (scratch / "jobs").mkdir()
    fake = scratch / "submit"
    fake.write_text(FAKE)
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    bag = DagBag(dag_folder=str(folder), safe_mode=False)
    found: dict[str, Any] = {"errors": bag.import_errors, "dags": sorted(bag.dags)}
    dag = bag.dags["sparkdl_flights"]
    found["order"] = {task.task_id: sorted(task.downstream_task_ids) for task in dag.tasks}
    found["templates"] = {task.task_id: task.pipeline_run for task in dag.tasks}
    found["retries"] = [task.retries for task in dag.tasks]
    module = sys.modules[type(dag.tasks[0]).__module__]
    module.SUBMIT, module.PROJECT = [str(fake)], str(scratch)
    ends = {}
    for code in (0, 2, 6, 75):
        operator = module.SparkDLJob(
            task_id=f"ends_{code}",
            job="train",
            config="conf/x.yaml",
            pipeline_run="; touch /tmp/no",
            arguments=[f"--code={code}"],
        )
        try:
            ends[code] = operator.execute({})["status"]
        except Exception as error:
            ends[code] = f"{type(error).__name__}: {error}"
    found["ends"] = ends
    found["arguments"] = (scratch / "arguments.txt").read_text().splitlines()
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]))))
