"""A model's test accuracy over the time of a fit: snapshots while it trains, judged afterwards.

Whoever trains writes the parameters to a file after every epoch, named by the time at which they
were there; about a millisecond for the digits' MLP. Nothing is judged before the fit has returned.
Shared by time_to_accuracy.py and its children, so without sparkdl and pyspark: elephas has others.
"""

import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import digits
import numpy as np
import torch
from torch import nn

Curve = list[tuple[float, float]]
"""Seconds since the call of a fit, and the test accuracy of the model that was there then."""
Fit = Callable[..., None]
"""``fit(data, snapshots, seed=..., **settings)``: trains, and takes a snapshot every epoch."""


def take(snapshots: Path, parameters: Iterable[np.ndarray]) -> None:
    """Writes down a model as it is now.

    Args:
        snapshots: an existing folder, of one fit.
        parameters: float32, in the order and shapes of ``digits.build_mlp().parameters()``.
    """
    moment = time.time()
    np.save(snapshots / f"{moment!r}.npy", np.concatenate([each.ravel() for each in parameters]))


def take_module(snapshots: Path, model: nn.Module) -> None:
    """Writes down a ``digits.build_mlp()``, wrapped or not, as it is now."""
    take(snapshots, (each.detach().numpy() for each in model.parameters()))


def judged(snapshots: Path, called: float, data: Path) -> Curve:
    """Returns the accuracy of each snapshot, in the order of time.

    Args:
        snapshots: the folder in which they were taken.
        called: when the fit was called, as ``time.time()``.
        data: data set written by ``digits.write``.
    """
    model = digits.build_mlp()
    curve = []
    for path in sorted(snapshots.glob("*.npy"), key=lambda path: float(path.stem)):
        nn.utils.vector_to_parameters(torch.from_numpy(np.load(path)), model.parameters())
        seconds = float(path.stem) - called
        curve.append((round(seconds, 3), round(digits.accuracy(model, data), 4)))
    return curve


def crossing(curve: Sequence[tuple[float, float]], wanted: float) -> float | None:
    """Returns the seconds of the first snapshot with at least the accuracy; None without one."""
    return next((seconds for seconds, accuracy in curve if accuracy >= wanted), None)


def fits(fit: Fit, data: Path, plan: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls a fit once for each entry of a plan, and judges what it has trained.

    Args:
        fit: of one contender.
        data: data set written by ``digits.write``.
        plan: keyword arguments of each fit, ``seed`` among them.

    Returns:
        ``seconds`` of each whole call, and its ``curve``.

    Raises:
        RuntimeError: a fit has taken another number of snapshots than its ``epochs``.
    """
    measured = []
    for settings in plan:
        with tempfile.TemporaryDirectory() as folder:
            called = time.time()
            fit(data, Path(folder), **settings)
            seconds = time.time() - called
            curve = judged(Path(folder), called, data)
        if len(curve) != settings["epochs"]:
            raise RuntimeError(f"{len(curve)} snapshots of {settings['epochs']} epochs")
        measured.append({"seconds": round(seconds, 3), "curve": curve})
    return measured
