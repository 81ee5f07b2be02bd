"""Models and worlds that make no cube are refused in words, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cubes import MovedBytes, playing_one_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from sparkdl.checkpoint.state_files import save_state
from sparkdl.errors import ConfigError
from sparkdl.parallel.cube import cube_mesh, require_edge
from sparkdl.parallel.model import parallelize_3d


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


REFUSED: dict[str, tuple[Any, str]] = {
    "inputs": (lambda: nn.Linear(5, 8), "in_features=5, which q = 2 does not divide. Pad it to 6"),
    "outputs": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 10)),
        r"'1' has out_features=10, which q\^2 = 4 does not divide. Pad it to 12",
    ),
    "words": (
        lambda: nn.Sequential(nn.Embedding(9, 8)),
        "'0' has num_embeddings=9, .* Pad it to 1",
    ),
    "width": (lambda: nn.Embedding(8, 6), "embedding_dim=6, .* Pad it to 8"),
    "norm": (lambda: nn.LayerNorm(7), "normalized_shape=7, .* Pad it to 8"),
    "norms": (lambda: nn.LayerNorm((4, 4)), r"normalizes 2 dimensions \(4, 4\)"),
    "rows": (lambda: nn.Embedding(8, 8, max_norm=1.0), "max_norm"),
    "tied": (tied, "'1.weight' is tied: it is '0.weight' too"),
    "weight_norm": (
        lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8))),
        "the weight of '0' is computed from others",
    ),
    "batch norm": (lambda: nn.Sequential(nn.BatchNorm1d(8)), "'0', a BatchNorm1d, needs"),
    "dropout": (lambda: nn.Sequential(nn.AlphaDropout()), "'0', a AlphaDropout, draws random"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_layer_that_cannot_lie_in_parts_is_refused_by_name(mesh: Any, name: str) -> None:
    build, said = REFUSED[name]
    model = build()
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
        product = parallelize_3d(
            nn.Sequential(nn.Linear(64, 128, bias=False)), cube_mesh(4, "cpu")
        )[0]
        assert product.weight.to_local().numel() == 64 * 128 // 64
        inputs = product.cube.replicated(torch.zeros(32, 64))
        inputs = inputs.redistribute(placements=product.cube.activations("l", 2)).requires_grad_()
        with MovedBytes() as moved:
            product(inputs).to_local().sum().backward()
    assert moved.received == 2 * 3 / 64 * 4 * (32 * 64 + 64 * 128 + 32 * 128)
