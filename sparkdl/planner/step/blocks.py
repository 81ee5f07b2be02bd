"""Which blocks of a model keep what they compute, and which compute it again, in which precision.

Zou et al. 2017 choose an algorithm of convolution for each layer under a memory budget. What torch
lets one choose is whether a block keeps its activations for the backward pass or recomputes them
(``torch.utils.checkpoint``), and in which precision it computes. Each block is measured alone, with
the inputs that it gets in the model: the seconds of its forward and backward pass; what it holds in
between, but for its output, which is the next block's input; and what it needs while its backward
pass runs. What there is besides is what a step in which each block holds least has beyond that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from sparkdl.arguments import require_whole
from sparkdl.errors import ConfigError
from sparkdl.planner.step.block_costs import blocks_of, called_once, measured, peaks_of, run_as
from sparkdl.planner.step.knapsack import Option, fastest, memory_of
from sparkdl.planner.step.memory import (
    Example,
    as_batch,
    gradient_bytes,
    in_words,
    probe,
    rows_of,
)
from sparkdl.protocols import LossFunction, OptimizerBuilder
from sparkdl.replica.replica import Precision


@dataclass(frozen=True)
class BlockPlan:
    """How each block runs.

    Attributes:
        blocks: by name, the option that is chosen: it is called ``keep`` or ``recompute``, followed
            by the precision.
        options: by name, what there was to choose from.
        batch_size: rows of the minibatch.
        memory: the most bytes at any time of a step, as predicted.
        seconds: of a step, as predicted, on the device where it was measured.
    """

    blocks: dict[str, Option]
    options: dict[str, tuple[Option, ...]]
    batch_size: int
    memory: int
    seconds: float

    def apply(self, model: nn.Module) -> nn.Module:
        """Have a model's blocks run so: call it in the function that builds the model.

        Parameters, buffers and random numbers become the same bits as without, but for bf16.

        Returns:
            The model.

        Raises:
            ConfigError: it has no such block.
        """
        for name, option in self.blocks.items():
            run_as(_block(model, name), option.name)
        return model


def _block(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise ConfigError(f"the model has no block {name!r}: {error}") from error


def plan_blocks(
    model: nn.Module,
    example: Example,
    *,
    batch_size: int,
    budget: int,
    optimizer: OptimizerBuilder,
    loss: LossFunction | None = None,
    blocks: Sequence[str] | None = None,
    precisions: Sequence[Precision] = ("float32",),
    features_as_kwargs: bool = False,
) -> BlockPlan:
    """Choose how each block runs, so that a step fits into the memory and takes least time.

    It is measured on the device where the model is, which should be like the workers'.

    Args:
        model: it is copied, and stays as it is.
        example: as for ``step_memory``.
        batch_size: rows of the minibatch.
        budget: bytes that a step may take.
        optimizer: builds the optimizer.
        loss: as for ``step_memory``.
        blocks: names of modules, none within another; None for the elements of the outermost lists
            and sequences of modules. Those that a step calls several times are left as they are.
        precisions: what a block may compute in; ``"bf16"`` changes results.
        features_as_kwargs: as for the estimator.

    Raises:
        ConfigError: no choice fits, or an argument is wrong.
        ModelError: the model cannot be trained on the example.

    Source: Zou et al. 2017 (arXiv 1709.06622); see ``sparkdl.planner.step.knapsack``.
    """
    rows, budget = require_whole("batch_size", batch_size, 1), require_whole("budget", budget, 1)
    if not precisions or set(precisions) - {"float32", "bf16"}:
        raise ConfigError(f"precisions must be of 'float32' and 'bf16', got {precisions!r}")
    ways = [f"{how} {precision}" for precision in precisions for how in ("keep", "recompute")]
    replica = probe(model, optimizer, loss, features_as_kwargs=features_as_kwargs)
    batch = as_batch(example).to(replica.device)
    names = blocks_of(replica.module) if blocks is None else blocks
    parts = {name: _block(replica.module, name) for name in names}
    with in_words(f"the model cannot be trained on {rows} rows of the example"):
        needs = called_once(replica, rows_of(batch, 2), parts)
        options = measured(replica, rows_of(batch, rows), parts, needs, ways)
        if not options:
            raise ConfigError(
                f"of the blocks {list(names)} a step calls none exactly once: name others"
            )
        least = [min(found, key=lambda o: o.held) for found in options.values()]
        for name, option in zip(options, least, strict=True):
            run_as(parts[name], option.name)
        peaks, seconds = peaks_of(replica, rows_of(batch, rows), parts[list(options)[-1]])

    sizes = [gradient_bytes(parts[name].parameters()) for name in options]
    after = [sum(sizes[place + 1 :]) for place in range(len(sizes))]  # those that are there
    backward = [replace(o, working=o.working + g) for o, g in zip(least, after, strict=True)]
    others = max(0, peaks[1] - memory_of(backward, "order"))
    offered = [
        [replace(o, working=o.working + gradients + others) for o in found]
        for found, gradients in zip(options.values(), after, strict=True)
    ]
    output = Option("the model's output", 0.0, 0, max(0, peaks[0] - sum(o.held for o in least)))
    found = fastest([*offered, [output]], budget, "order")
    if peaks[2] > budget:
        raise ConfigError(
            f"a budget of {budget:,} bytes is too small: the optimizer's step takes {peaks[2]:,}"
        )
    chosen = {n: options[n][pick] for n, pick in zip(options, found.picks[:-1], strict=True)}
    seconds += sum(o.seconds for o in chosen.values()) - sum(o.seconds for o in least)
    return BlockPlan(chosen, options, rows, max(found.memory, peaks[2]), seconds)
