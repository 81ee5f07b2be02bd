"""DTensor's missing rule for ``scaled_dot_product_attention`` on CPUs: rows and heads are apart.

torch has such rules for its kernels on GPUs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from sparkdl.errors import ConfigError

Rule = tuple[list[Placement], list[Placement | None]]


@cache
def register_attention() -> None:
    """Tell DTensor; the inputs are of shape (rows, heads, positions, features)."""
    aten = torch.ops.aten
    register_sharding(aten._scaled_dot_product_flash_attention_for_cpu.default)(_forward)
    register_sharding(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)(_backward)


def _lying(tensors: int, where: Placement, mask: Any) -> list[Placement | None]:
    """Placements of tensors along one dimension of a mesh, and of a mask."""
    along: list[Placement | None] = [where] * tensors
    if mask is None:
        return along
    # DTensor keeps a rule for later calls whatever their masks, so one that splits them would be
    # taken for others too. This one fails in the kernel then.
    if any(size > 1 for size in mask.shape[:-2]):
        raise ConfigError(
            f"scaled_dot_product_attention: attn_mask of shape {tuple(mask.shape)} differs by row "
            "or head, which DTensor cannot divide. Take one of shape (positions, positions)"
        )
    return [*along, Replicate()]


def _forward(*arguments: Any, attn_mask: Any = None, **_: Any) -> list[Rule]:
    numbers: list[Placement | None] = [None] * (len(arguments) - 3)
    rules: list[Rule] = []
    for where in (Replicate(), Shard(0), Shard(1)):
        query, key, value, *mask = _lying(3, where, attn_mask)
        rules.append(([where, where], [query, key, value, *numbers, *mask]))
    return rules


def _backward(*arguments: Any, attn_mask: Any = None, **_: Any) -> list[Rule]:
    numbers: list[Placement | None] = [None] * (len(arguments) - 6)
    rules: list[Rule] = []
    for where in (Replicate(), Shard(0), Shard(1)):
        given = _lying(6, where, attn_mask)
        rules.append(([where] * 3, [*given[:6], *numbers, *given[6:]]))
    return rules
