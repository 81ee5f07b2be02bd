"""Layers in three dimensions: their values, refusals and training."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from cubes import MovedBytes, playing_one_of, run_cube
from every_row import every_row
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from sparkdl.checkpoint.state_files import save_state
from sparkdl.errors import ConfigError
from sparkdl.parallel.cube import cube_mesh, require_edge
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
        return self.norm(self.words(words) + self.places(words[:1] % 6))


def published_shapes(mesh: Any) -> dict[str, Any]:
    """A weight of [256, 1024] and activations of [16, 256], as in the paper's code."""
    shapes: dict[str, Any] = {}
    model = nn.Sequential(nn.Linear(256, 1024), nn.Identity(), nn.Linear(1024, 256))
    for layer, name in ((model[1], "hidden"), (model[2], "outputs")):
        layer.register_forward_hook(
            lambda _, __, found, name=name: shapes.update({name: tuple(found.to_local().shape)})
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


@pytest.fixture
def mesh() -> Iterator[Any]:
    with playing_one_of(8):
        yield cube_mesh(2, "cpu")


@pytest.mark.parametrize(
    ("q", "workers", "said"),
    [
        (2, 6, r"q=2 has 2 x 2 x 2 = 8 workers, and this run has 6. Use num_workers=8 with q=2"),
        (4, 27, r"= 64 workers, and this run has 27. Use num_workers=27 with q=3 or .*64 with q=4"),
        (1, 1, "q must be a whole number >= 2"),
        (1.5, 8, "q must be a whole number >= 2"),
    ],
)
def test_other_world_sizes_are_refused(q: Any, workers: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        require_edge(q, workers)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    return model


NARROW = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 10))
NORMED = nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8)))


@every_row(
    (nn.Linear(5, 8), "in_features=5, which q = 2 does not divide. Pad it to 6"),
    (NARROW, r"'1' has out_features=10, which q\^2 = 4 does not divide. Pad it to 12"),
    (nn.Sequential(nn.Embedding(9, 8)), "'0' has num_embeddings=9, .* Pad it to 1"),
    (nn.Embedding(8, 6), "embedding_dim=6, .* Pad it to 8"),
    (nn.LayerNorm(7), "normalized_shape=7, .* Pad it to 8"),
    (nn.LayerNorm((4, 4)), r"normalizes 2 dimensions \(4, 4\)"),
    (nn.Embedding(8, 8, max_norm=1.0), "max_norm"),
    (tied(), "'1.weight' is tied: it is '0.weight' too"),
    (NORMED, "the weight of '0' is computed from others"),
    (nn.Sequential(nn.BatchNorm1d(8)), "'0', a BatchNorm1d, needs"),
    (nn.Sequential(nn.AlphaDropout()), "'0', a AlphaDropout, draws random"),
)
def test_a_layer_that_cannot_lie_in_parts_is_refused_by_name(
    mesh: Any, model: nn.Module, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        parallelize_3d(model, mesh)
    assert all(type(each).__module__.startswith("torch") for each in model.modules())


def test_what_is_parallel_already_and_other_meshes_are_refused(mesh: Any) -> None:
    model = parallelize_3d(nn.Sequential(nn.Linear(8, 8)), mesh)
    with pytest.raises(ConfigError, match="'0' is parallel already"):
        parallelize_3d(model, mesh)
    for other in (init_device_mesh("cpu", (2, 4), mesh_dim_names=("j", "l")), None):
        with pytest.raises(ConfigError, match=r"mesh must be that of worker.mesh\(q=\.\.\.\)"):
            parallelize_3d(nn.Linear(8, 8), other)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"no nn.Linear .* like 'proj\*'. It has '0'"):
        parallelize_3d(nn.Sequential(nn.Linear(8, 8)), mesh, second="proj*")


def test_rows_that_do_not_divide_are_refused_by_the_layer_that_gets_them(mesh: Any) -> None:
    model = parallelize_3d(nn.Sequential(nn.Identity(), nn.Linear(8, 8)), mesh)
    said = r"'1' got inputs of shape \(6, 8\).* multiple of q\^2 = 4. Take minibatches of 8 rows"
    with pytest.raises(ConfigError, match=said):
        model(torch.zeros(6, 8))
    words = parallelize_3d(nn.Sequential(nn.Embedding(8, 8)), mesh)
    with pytest.raises(IndexError, match="'0' got numbers from 0 to 8, and has a table of 8 rows"):
        words(torch.tensor([[0], [8], [1], [2]]))


def test_a_mask_that_differs_by_row_or_head_is_refused(mesh: Any) -> None:
    linear = parallelize_3d(nn.Sequential(nn.Linear(8, 8)), mesh)[0]
    heads, mask = (linear.cube.replicated(torch.zeros(4, 2, 6, size)) for size in (8, 6))
    with pytest.raises(RuntimeError, match=r"attn_mask of shape \(4, 2, 6, 6\) differs by row"):
        nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)


def test_parts_of_tensors_are_not_saved_as_if_they_were_all(mesh: Any) -> None:
    model = parallelize_3d(nn.Linear(8, 8), mesh)
    with pytest.raises(ConfigError, match=r"'model' holds DTensors.*full_state_dict=True"):
        save_state(None, {"model": model})  # type: ignore[arg-type]


def test_of_64_ranks_each_has_a_64th_and_moves_the_published_bytes() -> None:
    with playing_one_of(64):
        layer = nn.Sequential(nn.Linear(64, 128, bias=False))
        product = parallelize_3d(layer, cube_mesh(4, "cpu"))[0]
        assert product.weight.to_local().numel() == 64 * 128 // 64
        inputs = product.cube.replicated(torch.zeros(32, 64))
        inputs = inputs.redistribute(placements=product.cube.activations("l", 2)).requires_grad_()
        with MovedBytes() as moved:
            product(inputs).to_local().sum().backward()
    assert moved.received == 2 * 3 / 64 * 4 * (32 * 64 + 64 * 128 + 32 * 128)


WORDS, WIDTH, HEADS, LENGTH, ROWS = 20, 16, 4, 8, 8
SECOND = ("*.projection", "*.narrow")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.0)

    def forward(self, hidden: Tensor) -> Tensor:
        rows, length, width = hidden.shape
        normal = self.before(hidden)
        heads = (
            layer(normal).view(rows, length, HEADS, width // HEADS).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        seen = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        seen = seen.transpose(1, 2).reshape(rows, length, width)
        hidden = hidden + self.dropout(self.projection(seen))
        return hidden + self.narrow(nn.functional.gelu(self.wide(self.between(hidden))))


class Transformer(nn.Module):
    """Two blocks, with a parameter of its own that no layer has."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.register_buffer("order", torch.arange(LENGTH).unsqueeze(0))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.Sequential(Block(), Block())
        self.after, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        hidden = (self.words(words) + self.places(self.order)) * self.scale
        return self.head(self.after(self.blocks(hidden)))


def build() -> Transformer:
    torch.manual_seed(0)
    return Transformer().double()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Returns the losses and norms of the gradients."""
    seen = []
    for step in steps:
        random = torch.Generator().manual_seed(step)
        words = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=random)
        logits = model(words[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        seen += [loss.item(), norm.item()]
    return seen


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


@pytest.mark.nightly
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
