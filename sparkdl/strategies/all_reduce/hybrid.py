"""Which fully connected layers are split over groups of workers, and over how many groups.

Das et al. 2016, "Distributed Deep Learning Using Synchronous Stochastic Gradient Descent" (arXiv
1602.06709), section 3.3. N workers stand in G groups of M = N / G. Each worker of a group computes
its strip of a layer's outputs for all rows of the group, and only those workers of all groups that
have the same strip add up its gradients. With b rows in a worker's step, and 4 bytes a value in
float32, a worker sends for a layer with bias

    between groups   4 * 2 * (G - 1) / G * (inputs + 1) * outputs / M      gradients, in a ring
    within a group   4 * 2 * (M - 1) * b * (inputs + outputs / M)          rows, there and back

G = N is plain data parallelism, G = 1 a layer that all workers compute together. The paper's G*,
sqrt(b * N^2 / outputs), is where the derivative of its own form is 0. That has M in the place of
M - 1, and no outputs, which stay where they were computed as the next layer's inputs; here they
are given back, as whatever stands between two layers is the user's.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from sparkdl.errors import ConfigError
from sparkdl.replica import Replica
from sparkdl.replica.flat import has_gradient_hook
from sparkdl.strategies.arguments import CheckedFields, argument, must
from sparkdl.strategies.worker_group import Grid


@dataclass(frozen=True)
class Hybrid(CheckedFields):
    """Has groups of workers compute fully connected layers together, in ``GradientAllReduce``.

    Such layers have many parameters and little to compute, so their gradients are most of what
    all-reduce sends. A group exchanges the rows of its minibatches instead. The result is that of
    all-reduce.

    Args:
        layers: which layers: a pattern as for file names, such as ``"classifier.*"``, that is
            compared with the names of the model's ``nn.Linear`` modules.
        groups: number of groups, a divisor of the number of workers; fewer groups send fewer
            gradients and more rows. ``"auto"`` takes the one with which a worker sends least, if
            the layers see one vector per row: for sequences, which are many, choose it yourself.

    Raises:
        ConfigError: an argument is out of range.
    """

    layers: str = field(
        metadata=must(
            "a pattern of names such as 'classifier.*'",
            lambda value: isinstance(value, str) and value != "",
        )
    )
    groups: int | Literal["auto"] = argument(
        "auto",
        must(
            "a whole number of groups >= 1, or 'auto'",
            lambda value: value == "auto" or (type(value) is int and value >= 1),
        ),
    )

    def named(self, module: nn.Module) -> dict[str, nn.Linear]:
        """The layers of a model that are split, by name.

        Args:
            module: the model.

        Raises:
            ConfigError: there are none, or one cannot be split.
        """
        matched = {
            name: each
            for name, each in module.named_modules()
            if fnmatch.fnmatchcase(name, self.layers)
        }
        # Subclasses may compute something else with their weights.
        found = {name: each for name, each in matched.items() if type(each) is nn.Linear}
        if not found:
            others = [name for name, each in module.named_modules() if type(each) is nn.Linear]
            raise ConfigError(
                f"hybrid: no nn.Linear of this model has a name like {self.layers!r}. It has "
                + (", ".join(map(repr, others[:20])) or "none")
            )
        users = Counter(
            parameter for each in module.modules() for parameter in each.parameters(recurse=False)
        )
        for name, layer in found.items():
            _require_splits(name, layer, users)
        return found

    def require_fits(self, replica: Replica) -> None:
        """Check that a replica's layers can be split, and that its optimizer may step strips.

        Raises:
            ConfigError: they cannot.
        """
        self.named(replica.module)
        replica.require_strips()

    def require_workers(self, workers: int) -> None:
        """Check that the groups divide the workers.

        Raises:
            ConfigError: they do not.
        """
        if self.groups != "auto" and workers % self.groups:
            divisors = [str(each) for each in range(1, workers + 1) if workers % each == 0]
            raise ConfigError(
                f"hybrid: {self.groups} groups do not divide {workers} workers. Use "
                f"{', '.join(divisors)} groups, or groups='auto'"
            )

    def grid(self, layers: Iterable[nn.Linear], rows: int, workers: int) -> Grid:
        """The workers, with a group in each row.

        Args:
            layers: those that are split.
            rows: of one worker in an optimizer step.
            workers: how many there are.
        """
        self.require_workers(workers)
        if self.groups != "auto":
            return Grid(workers, workers // self.groups)
        split = list(layers)
        grids = [Grid(workers, each) for each in range(1, workers + 1) if workers % each == 0]
        return min(grids, key=lambda grid: sum(sent_bytes(each, rows, grid) for each in split))


def sent_bytes(layer: nn.Linear, rows: int, grid: Grid) -> float:
    """Bytes that a worker sends in a step for a layer that is neither the first nor ragged.

    Args:
        layer: the layer.
        rows: of one worker in a step.
        grid: the workers, with a group in each row.
    """
    members, groups = grid.width, grid.world_size // grid.width
    values = sum(each.numel() for each in layer.parameters()) / members
    between = 2 * (groups - 1) / groups * values
    within = 2 * (members - 1) * rows * (layer.in_features + layer.out_features / members)
    return layer.weight.element_size() * (between + within)


def _require_splits(name: str, layer: nn.Linear, users: Counter[nn.Parameter]) -> None:
    own = dict(layer.named_parameters(recurse=False))
    advice = "Choose a pattern that leaves the layer out"
    if "weight" not in own:
        raise ConfigError(
            f"hybrid: the weight of '{name}' is computed from others, as by weight_norm. {advice}"
        )
    for kind, parameter in own.items():
        found = None
        if not parameter.requires_grad:
            found = "is frozen, and has no gradient to save the exchange of"
        elif users[parameter] > 1:
            found = "is tied: another layer has it too, and would need all of it"
        elif not parameter.is_floating_point():
            found = f"is of {parameter.dtype}, where real numbers are needed"
        elif has_gradient_hook(parameter):
            found = "has a hook on its gradient, which a part of it does not have"
        if found is not None:
            raise ConfigError(f"hybrid: the {kind} of '{name}' {found}. {advice}")
