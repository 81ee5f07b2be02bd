"""The layers that K-FAC supports, what it collects from them, and which worker computes with which.

With a row's inputs a_t and output gradients g_t at the positions t = 1..T of a layer (1 for a
Linear layer on vectors, the pixels of a convolution's output, the items of a sequence; and as many
for each of several calls):

    A = E[sum_t a_t a_t^T]        a_t with a 1 appended if the layer has a bias; patches if Conv2d
    G = E[sum_t g_t g_t^T] / T

whose Kronecker product approximates the Fisher matrix of the layer's weights (Martens & Grosse
2015; Grosse & Martens 2016, of whose KFC these are the sum and the mean over positions). Pauloski's
code has A / T^2 and G T^2: the same product, but means that begin at the identity then differ for
as long as that is felt. The expectation is over rows with their actual labels.

The workers stand in a grid (Pauloski et al. 2021, "KAISA: An Adaptive Second-Order Optimizer
Framework for Deep Neural Networks"). Each layer belongs to a row of it. The workers of that row
divide the decompositions of its layers among themselves, share the results, and each preconditions
the gradients of all these layers, which then go down the columns.

    fraction 1         COMM-OPT   one row: all have all decompositions, no gradient travels
    fraction 1 / P     MEM-OPT    one column: each has those of its layers, all gradients travel
    between            HYBRID     decompositions within rows, gradients within columns
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparkdl.strategies.worker_group import Grid


class FactoredLayer:
    """One Linear or Conv2d layer.

    Args:
        module: the layer.

    Attributes:
        input_size: rows and columns of A.
        output_size: those of G.
    """

    def __init__(self, module: nn.Linear | nn.Conv2d) -> None:
        self.module = module
        bias = module.bias
        self._bias = bias if bias is not None and bias.requires_grad else None
        self.output_size = module.weight.shape[0]
        self.input_size = module.weight[0].numel() + (self._bias is not None)
        self.dtype = torch.promote_types(module.weight.dtype, torch.float32)

    @property
    def gradient(self) -> Tensor | None:
        """A copy of shape (output_size, input_size); None if there is no gradient."""
        weight = self.module.weight.grad
        if weight is None:
            return None
        parts = [weight.reshape(self.output_size, -1)]
        if self._bias is not None:
            bias = self._bias.grad
            parts.append(weight.new_zeros(self.output_size, 1) if bias is None else bias[:, None])
        return torch.cat(parts, dim=1).to(self.dtype)

    def set_gradient(self, values: Tensor) -> None:
        """Overwrite the existing gradient.

        Args:
            values: (output_size, input_size).
        """
        weight = self.module.weight.grad
        assert weight is not None
        if self._bias is not None:
            if self._bias.grad is not None:
                self._bias.grad.copy_(values[:, -1])
            values = values[:, :-1]
        weight.copy_(values.reshape(weight.shape))

    def moments(self, inputs: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor, int]:
        """Sums over a call's positions: of a a^T, and of g g^T; and how many those are.

        Args:
            inputs: what the layer was given, whose first dimension need not be the minibatch's.
            gradients: of its outputs.
        """
        a, g = self._positions(inputs.detach(), gradients)
        if self._bias is not None:
            a = functional.pad(a, (0, 1), value=1.0)
        return a.T @ a, g.T @ g, len(g)

    def _positions(self, inputs: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs and the returned gradients, one line per position."""
        inputs, gradients = inputs.to(self.dtype), gradients.to(self.dtype)
        module = self.module
        if isinstance(module, nn.Linear):
            return inputs.reshape(-1, inputs.shape[-1]), gradients.reshape(-1, self.output_size)
        patches = functional.unfold(
            inputs,
            module.kernel_size,  # type: ignore[arg-type]
            dilation=module.dilation,  # type: ignore[arg-type]
            padding=module.padding,  # type: ignore[arg-type]
            stride=module.stride,  # type: ignore[arg-type]
        )
        return (
            patches.transpose(1, 2).reshape(-1, patches.shape[1]),
            gradients.movedim(1, -1).reshape(-1, self.output_size),
        )


def factored_layers(module: nn.Module) -> dict[str, FactoredLayer]:
    """The layers of a model that K-FAC supports, by name, in the model's order.

    Args:
        module: the model; its other layers keep their gradients. Those include grouped convolutions
            and ones with padding other than a number of zeros, layers that are frozen, empty or
            complex, and those that share their weights.
    """
    users = Counter(
        id(parameter) for each in module.modules() for parameter in each.parameters(recurse=False)
    )
    return {
        name: FactoredLayer(each)
        for name, each in module.named_modules()
        if _is_known(each) and _is_trained(each.weight) and users[id(each.weight)] == 1
    }


def _is_trained(weight: Tensor) -> bool:
    return weight.requires_grad and weight.is_floating_point() and weight.numel() > 0


def _is_known(module: Any) -> bool:
    # Subclasses may compute something else with their weights.
    if type(module) is nn.Linear:
        return True
    return (
        type(module) is nn.Conv2d
        and module.groups == 1
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    )


def assign(
    grid: Grid, sizes: Mapping[str, tuple[int, int]]
) -> tuple[dict[str, int], dict[str, tuple[int, int]]]:
    """Assign layers to rows and their decompositions to workers, the longest first.

    Args:
        grid: the workers.
        sizes: of A and G, by layer; a decomposition's cost is cubic in the size.

    Returns:
        By layer, its row; and the rank that decomposes A, and the one that decomposes G.
    """
    work = {name: a**3 + g**3 for name, (a, g) in sizes.items()}
    of_row = [0] * len(grid.rows)
    row_of: dict[str, int] = {}
    for name in sorted(work, key=lambda name: -work[name]):
        row = of_row.index(min(of_row))
        of_row[row] += work[name]
        row_of[name] = row
    jobs = [(size**3, name, k) for name, pair in sizes.items() for k, size in enumerate(pair)]
    of_rank = [0] * grid.world_size
    ranks: dict[tuple[str, int], int] = {}
    for cost, name, factor in sorted(jobs, key=lambda job: -job[0]):
        rank = min(grid.rows[row_of[name]], key=lambda rank: of_rank[rank])
        of_rank[rank] += cost
        ranks[name, factor] = rank
    return row_of, {name: (ranks[name, 0], ranks[name, 1]) for name in sizes}
