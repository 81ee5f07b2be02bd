"""A session of two executors with one faked GPU each, which only our stages ask for.

    python one_gpu_a_task.py DISCOVERY

Prints the GPUs of the ranks of a run, and how many rows a fit has trained on, as JSON. torch sees
no GPU, so the ranks compute on the CPU.
"""

from __future__ import annotations

import json
import sys

import cloudpickle
from frames import estimator, frame

import sparkdl
from sparkdl import ParameterAveraging, create_session

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def gpu() -> str | None:
    return sparkdl.current_worker().gpu


def main(discovery: str) -> None:
    spark = create_session(
        "one GPU a task",
        master="local-cluster[2,2,1024]",
        conf={
            "spark.executor.memory": "1024m",
            "spark.ui.enabled": "false",
            "spark.worker.resource.gpu.amount": "1",
            "spark.worker.resource.gpu.discoveryScript": discovery,
            "spark.executor.resource.gpu.amount": "1",
        },
    )
    spark.sparkContext.setLogLevel("OFF")
    model = estimator(strategy=ParameterAveraging(period=2)).fit(frame(spark, 70, 3))
    gpus = sparkdl.run(gpu, num_workers=2)  # gang-scheduled
    print(json.dumps({"gpus": gpus, "rows": model.history[0].examples}))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
