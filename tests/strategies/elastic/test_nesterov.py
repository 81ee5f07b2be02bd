"""Nesterov's momentum around an optimizer: where the parameters are, and where the replica is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from every_row import every

from sparkdl.strategies.elastic.nesterov import NesterovMomentum

CURVATURE = np.array([0.3, 1.0, 4.0])


def test_parameters_move_as_torch_s_do_and_the_place_is_the_one_before_the_look_ahead() -> None:
    """On a bowl; x and v of Sutskever et al. in numpy."""
    ours, torchs = (torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    plain = torch.optim.SGD([ours], lr=0.05)
    nesterov = torch.optim.SGD([torchs], lr=0.05, momentum=0.9, nesterov=True)
    momentum = NesterovMomentum(0.9, [ours.detach()])
    x, v = np.ones(3), np.zeros(3)
    for _ in range(30):
        for parameter, optimizer in ((ours, plain), (torchs, nesterov)):
            parameter.grad = parameter.detach() * torch.from_numpy(CURVATURE)
            optimizer.step()
        momentum.after_step([ours.detach()])
        momentum.leave([ours.detach()])
        v = 0.9 * v - 0.05 * CURVATURE * (x + 0.9 * v)
        x = x + v
        assert np.allclose(ours.detach(), torchs.detach(), rtol=1e-12, atol=1e-15)
        place = ours.detach().clone()
        momentum.to_place(place, 0)
        assert np.allclose(place, x, rtol=1e-12, atol=1e-15)


def test_without_momentum_nothing_is_kept_and_nothing_moves() -> None:
    values = torch.ones(3)
    momentum = NesterovMomentum(0.0, [values])
    values += 1
    momentum.after_step([values])
    momentum.leave([values])
    momentum.to_place(values, 0)
    assert values.tolist() == [2.0] * 3
    assert momentum.saved() == {}


@every("dtype", [torch.bfloat16, torch.float16])
def test_of_half_precision_small_velocities_add_up(dtype: torch.dtype) -> None:
    """Each step is one unit in the last place, of which half precision could not keep a tenth."""
    values = torch.ones(1, dtype=dtype)
    unit = torch.finfo(dtype).eps
    momentum = NesterovMomentum(0.9, [values])
    for _ in range(8):
        values += unit
        momentum.after_step([values])
        momentum.leave([values])
    (velocity,) = momentum.saved().values()
    assert velocity.dtype is torch.float32
    assert float(velocity) == pytest.approx(unit * (1 - 0.9**8) / (1 - 0.9), rel=1e-5)
