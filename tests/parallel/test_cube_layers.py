"""Layers that eight ranks compute together give what one process computes."""

from __future__ import annotations

import copy
import sys
import warnings
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from cubes import MovedBytes, run_cube
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sparkdl.parallel.cube import cube_mesh
from sparkdl.parallel.model import parallelize_3d

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def far(one: Tensor, two: Tensor) -> float:
    assert one.shape == two.shape
    return float((one - two).detach().abs().max())


def errors(model: nn.Module, inputs: Tensor, mesh: Any, **how: Any) -> dict[str, float]:
    """How far outputs and gradients are from those of one process."""
    model, alone = model.double(), copy.deepcopy(model.double())
    cube = parallelize_3d(model, mesh, **how)
    theirs, ours = inputs.clone(), inputs.clone()
    if inputs.is_floating_point():
        theirs, ours = theirs.requires_grad_(), ours.requires_grad_()
    found, known = cube(ours), alone(theirs)
    weights = torch.randn(known.shape, dtype=known.dtype)
    (found * weights).sum().backward()
    (known * weights).sum().backward()
    far_off = {"outputs": far(found, known)}
    if ours.grad is not None and theirs.grad is not None:
        far_off["inputs"] = far(ours.grad, theirs.grad)
    for (name, mine), one in zip(cube.named_parameters(), alone.parameters(), strict=True):
        assert mine.grad.placements == mine.placements
        far_off[name] = far(mine.grad.full_tensor(), one.grad)
    return far_off


class Marked(nn.Module):
    """An Embedding whose last dimension is normalized, with positions that have no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(10, 8, padding_idx=3), nn.Embedding(6, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, words: Tensor) -> Tensor:
        normal: Tensor = self.norm(self.words(words) + self.places(words[:1] % 6))
        return normal


def published_shapes(mesh: Any) -> dict[str, Any]:
    """A weight of [256, 1024] and activations of [16, 256], as in the paper's code."""
    shapes: dict[str, Any] = {}
    model = nn.Sequential(nn.Linear(256, 1024), nn.Identity(), nn.Linear(1024, 256))
    model[1].register_forward_hook(
        lambda _, __, hidden: shapes.update(hidden=tuple(hidden.to_local().shape))
    )
    model[2].register_forward_hook(
        lambda _, __, outputs: shapes.update(outputs=tuple(outputs.to_local().shape))
    )
    cube = parallelize_3d(model, mesh)
    cube(torch.randn(16, 256))
    for name, parameter in cube.named_parameters():
        shapes[name] = tuple(parameter.to_local().shape)
    return shapes


def dropped(mesh: Any) -> dict[str, Any]:
    """What a mask leaves of ones, and of ones that every rank has; and the gradient of a mask."""
    block = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Dropout(0.25), nn.Linear(64, 64))
    nn.init.eye_(block[0].weight)
    nn.init.eye_(block[2].weight)
    nn.init.zeros_(block[2].bias)
    torch.manual_seed(dist.get_rank())  # the ranks' generators are made one
    cube = parallelize_3d(block, mesh)
    ones = torch.ones(16, 64, requires_grad=True)
    kept = checkpoint(cube, ones, use_reentrant=False)
    kept.sum().backward()
    alone = parallelize_3d(nn.Sequential(nn.Dropout(0.25)), mesh)
    return {
        "kept": kept.detach(),
        "gradient": ones.grad,
        "copies": alone(torch.ones(16, 64)),
        "evaluated": cube.eval()(ones).detach(),
    }


def everything() -> dict[str, Any]:
    """All that the tests ask for, in one process group."""
    mesh = cube_mesh(2, "cpu")
    torch.manual_seed(0)
    pair = [nn.Linear(16, 24), nn.GELU(), nn.LayerNorm(24, bias=False), nn.Linear(24, 8)]
    found: dict[str, Any] = {
        "linear": errors(nn.Sequential(*pair), torch.randn(8, 3, 16).double(), mesh),
        "embedding": errors(Marked(), torch.randint(10, (8, 6)), mesh),
    }
    half = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found["mistaken"] = errors(half, torch.randn(4, 16).double(), mesh, second=["0", "2"])
    found["warnings"] = [str(each.message) for each in caught if "second" in str(each.message)]
    found["shapes"] = published_shapes(mesh)
    # One product between its neighbours: its inputs lie as it wants them.
    product = parallelize_3d(nn.Sequential(nn.Linear(16, 32, bias=False)), mesh)[0]
    inputs = product.cube.replicated(torch.randn(8, 16))
    inputs = inputs.redistribute(placements=product.cube.activations("l", 2)).requires_grad_()
    with MovedBytes() as moved:
        product(inputs).to_local().sum().backward()
    found["moved"] = moved.received
    found["dropped"] = dropped(mesh)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_cube(everything, tmp_path_factory.mktemp("cube"))


@pytest.mark.parametrize("model", ["linear", "embedding", "mistaken"])
def test_outputs_and_gradients_are_those_of_one_process(ranks: Any, model: str) -> None:
    for found in ranks:
        assert max(found[model].values()) <= 1e-12, found[model]


def test_a_rank_has_an_eighth_of_weights_and_activations(ranks: Any) -> None:
    for found in ranks:
        assert found["shapes"] == {
            "hidden": (4, 512),
            "outputs": (4, 128),
            "0.weight": (1024 // 4, 256 // 2),
            "0.bias": (512,),
            "2.weight": (256 // 4, 1024 // 2),
            "2.bias": (128,),
        }


def test_a_product_and_its_gradients_move_the_published_bytes(ranks: Any) -> None:
    """Of X [8, 16], A [16, 32] and Y [8, 32] in float32: each (q - 1) / q^3, forward and back."""
    sizes = 4 * (8 * 16 + 16 * 32 + 8 * 32)
    assert {found["moved"] for found in ranks} == {2 * (2 - 1) / 2**3 * sizes}


def test_a_layer_of_the_other_kind_is_told_of_by_name_once(ranks: Any) -> None:
    assert [len(found["warnings"]) for found in ranks] == [1] + [0] * 7
    assert "inputs of '2' lie as for the other kind of Linear" in ranks[0]["warnings"][0]


def test_masks_of_dropout_differ_by_part_and_are_drawn_again_when_recomputed(ranks: Any) -> None:
    first = ranks[0]["dropped"]
    for found in ranks:
        for name, value in found["dropped"].items():
            assert torch.equal(value, first[name]), name
    kept = first["kept"] > 0
    assert torch.allclose(first["kept"][kept], torch.tensor(1 / 0.75))
    assert 0.65 < kept.float().mean() < 0.85
    parts = [part for rows in kept.split(4) for part in rows.split(32, 1)]
    assert not any(torch.equal(one, parts[0]) for one in parts[1:])
    assert torch.allclose(first["gradient"], first["kept"])
    assert torch.equal(first["evaluated"], torch.ones(16, 64))
    assert first["copies"].unique().tolist() == [0, pytest.approx(1 / 0.75)]
