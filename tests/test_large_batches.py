"""LARS and LAMB are the papers' in numpy, and workers together take their steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from every_row import every, every_row
from toys import classification, make_job, mlp, relative_error, sgd_on_union

from sparkdl.errors import ConfigError
from sparkdl.large_batches import LAMB, LARS
from sparkdl.strategies import GradientAllReduce
from sparkdl.testing import run_world

FAST = partial(LARS, lr=0.5, weight_decay=1e-2, trust=0.02)
ADAPTIVE = partial(LAMB, lr=0.02, weight_decay=1e-2)


def lars(w: np.ndarray, g: np.ndarray, kept: Any, step: int, lr: float) -> np.ndarray:
    """You, Gitman, Ginsburg 2017, algorithm 1, with the settings above."""
    if w.ndim == 1:
        kept["m"] = 0.9 * kept["m"] + lr * g
        return w - kept["m"]
    norm, other = np.linalg.norm(w), np.linalg.norm(g)
    rate = 0.02 * norm / (other + 1e-2 * norm) if norm and other + 1e-2 * norm else 1.0
    kept["m"] = 0.9 * kept["m"] + lr * rate * (g + 1e-2 * w)
    return w - kept["m"]


def lamb(w: np.ndarray, g: np.ndarray, kept: Any, step: int, lr: float) -> np.ndarray:
    """You et al. 2020, algorithm 2."""
    kept["m"] = 0.9 * kept["m"] + 0.1 * g
    kept["v"] = 0.999 * kept["v"] + 0.001 * g**2
    mean, square = kept["m"] / (1 - 0.9**step), kept["v"] / (1 - 0.999**step)
    update = mean / (np.sqrt(square) + 1e-6)
    if w.ndim == 1:
        return w - lr * update
    update = update + 1e-2 * w
    norm, other = np.linalg.norm(w), np.linalg.norm(update)
    return w - lr * (norm / other if norm and other else 1.0) * update


@every("shape", [(4, 3), (2, 3, 3, 2), (5,)])
@every("scale", [1.0, 0.0])
@every("of_rate", [[1.0] * 5, [0.0, 0.1, 0.4, 0.7, 1.0]])
@every(("build", "rule"), [(FAST, lars), (ADAPTIVE, lamb)])
def test_a_step_is_the_papers_at_a_constant_rate_and_in_a_warm_up(
    build: Any, rule: Any, of_rate: list[float], shape: Any, scale: float
) -> None:
    generator = np.random.default_rng(0)
    expected = scale * generator.normal(size=shape)
    weight = torch.nn.Parameter(torch.from_numpy(expected.copy()))
    optimizer = build([weight])
    kept = {"m": np.zeros(shape), "v": np.zeros(shape)}
    full = optimizer.param_groups[0]["lr"]
    for step, part in enumerate(of_rate, 1):
        optimizer.param_groups[0]["lr"] = full * part
        gradient = (scale if step == 2 else 1.0) * generator.normal(size=shape)
        weight.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        expected = rule(expected, gradient, kept, step, full * part)
        np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=1e-9)


@every("build", [FAST, ADAPTIVE])
def test_a_complex_layer_takes_the_steps_of_its_real_and_imaginary_parts(build: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.nn.Parameter(torch.randn(4, 3, dtype=torch.complex64, generator=generator))
    parts = torch.nn.Parameter(torch.view_as_real(whole.detach()).clone())
    optimizers = build([whole]), build([parts])
    for _ in range(3):
        parts.grad = torch.randn(4, 3, 2, generator=generator)
        whole.grad = torch.view_as_complex(parts.grad)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(torch.view_as_real(whole.detach()), parts.detach())


@every_row(
    (partial(LARS, lr=-1), "lr"),
    (partial(LARS, lr=1, momentum=1), "momentum"),
    (partial(LARS, lr=1, trust=0), "trust"),
    (partial(LAMB, betas=(0.9, 1)), "betas"),
    (partial(LAMB, eps=0), "eps"),
    (partial(LAMB, weight_decay=float("nan")), "weight_decay"),
)
def test_settings_out_of_range_are_refused(build: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build([torch.nn.Parameter(torch.ones(2))])


@every("build", [FAST, ADAPTIVE])
def test_workers_together_take_the_steps_of_one_process(build: Any) -> None:
    data = classification([12, 12])
    given = make_job(mlp(), strategy=GradientAllReduce(), optimizer=build, epochs=2)
    outcome = run_world(given, data.shards(), ranks_as="processes")
    assert relative_error(outcome.module, sgd_on_union(mlp(), data, build, epochs=2)) < 1e-9
