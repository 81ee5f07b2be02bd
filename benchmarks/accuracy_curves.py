"""A model's test accuracy over the time of a fit: snapshots while it trains, evaluated afterwards.

The trainer writes the parameters to a file after every epoch, named by the time at which it had
them, in about a millisecond for the digits' MLP. Nothing is evaluated before the fit has returned.
Shared by time_to_accuracy.py and all its children, even elephas': hence no sparkdl or pyspark.
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
"""Seconds since the call of a fit, and the test accuracy of the model at that time."""
Fit = Callable[..., None]
"""``fit(data, snapshots, seed=..., **settings)``: trains, and takes a snapshot every epoch."""


def take(snapshots: Path, parameters: Iterable[np.ndarray]) -> None:
    """Saves a model as it is now.

    Args:
        snapshots: an existing folder for one fit.
        parameters: float32, in the order and shapes of ``digits.build_mlp().parameters()``.
    """
    moment = time.time()
    np.save(snapshots / f"{moment!r}.npy", np.concatenate([each.ravel() for each in parameters]))


def take_module(snapshots: Path, model: nn.Module) -> None:
    """Saves a ``digits.build_mlp()``, wrapped or not, as it is now."""
    take(snapshots, (each.detach().numpy() for each in model.parameters()))


def judged(snapshots: Path, called: float, data: Path) -> Curve:
    """Returns the accuracy of each snapshot, in chronological order.

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
    """Returns the seconds to the first snapshot with at least that accuracy; None if none has."""
    return next((seconds for seconds, accuracy in curve if accuracy >= wanted), None)


def fits(fit: Fit, data: Path, plan: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls a fit once for each entry of a plan, and evaluates what it has trained.

    Args:
        fit: the fit of one contender.
        data: data set written by ``digits.write``.
        plan: the keyword arguments of each fit, including ``seed``.

    Returns:
        The ``seconds`` of each whole call, and its ``curve``.

    Raises:
        RuntimeError: the number of a fit's snapshots is not its ``epochs``.
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
