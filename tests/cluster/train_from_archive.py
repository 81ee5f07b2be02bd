"""A driver for the test of environments by spark.archives: fits, predicts, and says where that ran.

    spark-submit train_from_archive.py FOLDER

FOLDER, on a disk that all hosts share, gets ``result.json`` and a file for each host and phase,
``fit worker-1.json``, with the interpreter that computed there.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sparkdl
from sparkdl import TorchEstimator
from sparkdl.errors import SparkDLError


class Witness(nn.Linear):
    """A line through its inputs that writes down where it was computed.

    Args:
        folder: for what it writes.
    """

    def __init__(self, folder: str) -> None:
        super().__init__(2, 1)
        self._folder = folder

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        modules = {"torch": str(torch.__file__), "sparkdl": str(sparkdl.__file__)}
        seen = {"prefix": sys.prefix, "executable": sys.executable, **modules}
        phase = "fit" if self.training else "transform"
        path = Path(self._folder, f"{phase} {socket.gethostname()}.json")
        path.with_suffix(f".{os.getpid()}").write_text(json.dumps(seen))
        os.replace(path.with_suffix(f".{os.getpid()}"), path)
        return super().forward(features).flatten()


def main(folder: str) -> None:
    spark = sparkdl.create_session("train from an archive")
    spark.sparkContext.setLogLevel("OFF")
    result: dict[str, Any] = {"driver": sys.prefix}
    rows = spark.range(400).selectExpr("array(id / 400D, 1D) AS features", "id / 200D + 3D label")
    estimator = TorchEstimator(
        model=partial(Witness, folder),
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.3),
        epochs=20,
        numWorkers=2,
        progress=False,
    )
    try:
        model = estimator.fit(rows)
        worst = model.transform(rows).selectExpr("max(abs(prediction - label))").first()
        result["worst"] = worst[0]
    except SparkDLError as error:  # the test looks at it
        result["error"] = f"{type(error).__name__}: {error}"
    Path(folder, "result.json").write_text(json.dumps(result))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
