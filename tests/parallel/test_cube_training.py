"""A transformer that eight ranks train together becomes that of one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from cubes import run_cube
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from transformers_in_cubes import SECOND, build, train

from sparkdl.parallel.cube import cube_mesh
from sparkdl.parallel.model import parallelize_3d

cloudpickle.register_pickle_by_value(sys.modules[__name__])

STEPS = 20
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def trained() -> dict[str, Any]:
    """Half of the steps, then the rest by another cube that was given the whole state."""
    mesh = cube_mesh(2, "cpu")
    torch.manual_seed(0)
    model = parallelize_3d(build(), mesh, second=SECOND)
    optimizer = adam(model)
    half = STEPS // 2
    seen = train(model, optimizer, range(half))
    parts = [each.to_local().numel() for each in model.parameters()]
    states = get_model_state_dict(model, options=WHOLE)
    moments = get_optimizer_state_dict(model, optimizer, options=WHOLE)
    model = parallelize_3d(build(), mesh, second=SECOND)
    optimizer = adam(model)
    everywhere = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, states, options=everywhere)
    set_optimizer_state_dict(model, optimizer, moments, options=everywhere)
    seen += train(model, optimizer, range(half, STEPS))
    return {"seen": seen, "parts": parts, "state": get_model_state_dict(model, options=WHOLE)}


@pytest.mark.slow
def test_twenty_steps_equal_one_process_and_go_on_from_the_whole_state(tmp_path: Path) -> None:
    """With Adam, gradients clipped by their norm, and three Linear side by side."""
    alone = build()
    expected = train(alone, adam(alone), range(STEPS))
    ranks = run_cube(trained, tmp_path)
    for found in ranks:
        assert found["seen"] == pytest.approx(expected, rel=1e-9)
        whole = sum(each.numel() for each in alone.parameters())
        assert sum(found["parts"]) < 0.16 * whole  # an eighth of matrices, half of vectors
    state = ranks[0]["state"]
    for name, value in alone.state_dict().items():
        assert torch.allclose(state[name], value, rtol=1e-9, atol=1e-10), name
