"""Child process of averaging_memory.py: two fits of a Spark Connect client, small and large.

Prints, as its last line, the bytes by which the large fit raised the peak memory of this client, of
the process beside rank 0 that serves it, and of rank 0's own: ``{"client": ..., "serving": ...,
"rank": ...}``. The server is a JVM of its own, and so are its executors; none of them is counted.
"""

import argparse
import contextlib
import gc
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from averaging_memory import WIDTH, status_bytes
from fit_session import CONF, connect_session
from torch import nn

from sparkdl import TorchEstimator

SAMPLE_SECONDS = 0.1
MEMORY = {"spark.driver.memory": "3g", "spark.executor.memory": "3072m"}


def main() -> None:
    """Fits, and prints the peaks."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("layers", type=int)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    spark = connect_session("local-cluster[2,1,3072]", CONF | MEMORY)
    features = f"transform(sequence(1, {WIDTH}), x -> float(sin(id * x))) as features"
    rows = spark.range(0, 32, 1, 2).selectExpr(features, "float(id) as label")
    peaks = []
    for layers in (1, chosen.layers):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        with peaks_below() as seen:
            TorchEstimator(
                model=partial(network, layers),
                loss=nn.MSELoss(),
                optimizer=partial(torch.optim.SGD, lr=1e-4),
                batchSize=8,
                numWorkers=2,
                progress=False,
            ).fit(rows)
        peaks.append({**seen, "client": status_bytes("VmHWM")})
    small, large = peaks
    print(json.dumps({name: large[name] - small[name] for name in large}), flush=True)
    spark.stop()


def network(layers: int) -> nn.Module:
    """Returns layers of ``WIDTH``, and one output."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)), nn.Linear(WIDTH, 1))


@contextmanager
def peaks_below() -> Iterator[dict[str, int]]:
    """The peak memory of the processes that serve and that are rank 0, in bytes, once it is over.

    Spark's Python processes that have a child serve; the child forks rank 0.
    """
    seen: dict[str, int] = {"serving": 0, "rank": 0}
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(SAMPLE_SECONDS):
            for process in map(int, filter(str.isdigit, os.listdir("/proc"))):
                with contextlib.suppress(OSError, RuntimeError, IndexError):
                    for name, of in _roles(process).items():
                        seen[name] = max(seen[name], of)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    yield seen
    ended.set()
    thread.join()


def _roles(process: int) -> dict[str, int]:
    """What a fork server's parent and child have had at most; nothing for another process."""
    if "sparkdl.spark.launch.fork_server" not in _text(process, "cmdline"):
        return {}
    parent = int(_text(process, "status").partition("PPid:")[2].split()[0])
    if "sparkdl.spark.launch.fork_server" in _text(parent, "cmdline"):
        return {"rank": status_bytes("VmHWM", process)}
    return {"serving": status_bytes("VmHWM", parent)}


def _text(process: int, name: str) -> str:
    return Path(f"/proc/{process}/{name}").read_text()


if __name__ == "__main__":
    main()
