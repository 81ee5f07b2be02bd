"""What it costs that checkpoints survive a loss of power: epochs with ``fsync`` and without.

Four workers, each a process, train the network of the other benchmarks (1.9 MB of parameters and
momentum) with a checkpoint after every epoch, which is written during the next. In every second
epoch ``fsync`` does nothing, as if checkpoints were only renamed. In addition, a checkpoint of 25
million parameters is timed alone.
"""

import os
import statistics
import tempfile
import time
from unittest import mock

import recovery
import torch
from harness import Claim, parse, parser, report, show

from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.checkpoint.storage import CheckpointStore
from sparkdl.checkpoint.tensor_file import write_tensors
from sparkdl.events import EpochSummary
from sparkdl.strategies import ParameterAveraging
from sparkdl.testing import run_world

PARAMETERS = 25_000_000
Seconds = dict[bool, list[float]]
"""By whether ``fsync`` was done."""


def epochs(count: int, folder: str) -> Seconds:
    """Seconds of the epochs of a training, except the first four."""
    seconds: Seconds = {True: [], False: []}
    synchronizes, fsync = False, os.fsync

    def at_times(descriptor: int) -> None:
        if synchronizes:
            fsync(descriptor)

    def on_event(event: object) -> None:
        nonlocal synchronizes
        if isinstance(event, EpochSummary):
            if event.epoch > 4:
                seconds[synchronizes].append(event.seconds)
            synchronizes = not synchronizes

    with mock.patch("os.fsync", at_times):
        run_world(
            recovery.job(count, ParameterAveraging(recovery.PERIOD)),
            recovery.shards(recovery.ROWS),
            ranks_as="processes",
            checkpoints=CheckpointPolicy(path=folder),
            on_event=on_event,
        )
    return seconds


def alone(count: int, folder: str) -> Seconds:
    """Seconds that it takes to write a large checkpoint."""
    seconds: Seconds = {True: [], False: []}
    store = CheckpointStore(folder, keep_last=1)
    center = {"0.parameters": torch.ones(PARAMETERS)}
    for number in range(2 * count):
        synchronizes = bool(number % 2)
        with mock.patch("os.fsync", os.fsync if synchronizes else lambda descriptor: None):
            started = time.monotonic()
            pending = store.begin()
            with pending.create("center.safetensors") as file:
                write_tensors(file, center)
            pending.publish({})
            seconds[synchronizes].append(time.monotonic() - started)
        store.prune()
    return seconds


def main() -> None:
    """Measures and reports."""
    options = parser(__doc__)
    options.add_argument("--epochs", type=int, default=100)
    parsed = parse(options, repeats=6, quick_repeats=2)
    names = {True: "synchronized", False: "only renamed"}
    with tempfile.TemporaryDirectory() as folder:
        trained = epochs(16 if parsed.quick else parsed.epochs, folder)
    with tempfile.TemporaryDirectory() as folder:
        written = alone(parsed.repeats, folder)
    for kind, name in names.items():
        show(f"an epoch, the checkpoint {name}", trained[kind])
        show(f"a checkpoint of {PARAMETERS:,} parameters, {name}", written[kind])
    epoch = {kind: statistics.median(values) for kind, values in trained.items()}
    name = "epoch with a checkpoint that is synchronized / only renamed"
    report(
        "checkpoint_sync",
        [Claim(name=name, ratio=epoch[True] / epoch[False], target=1.02)],
        {
            "epoch_s": {names[kind]: value for kind, value in epoch.items()},
            "large_checkpoint_s": {
                names[kind]: statistics.median(values) for kind, values in written.items()
            },
        },
    )


if __name__ == "__main__":
    main()
