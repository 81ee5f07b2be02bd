"""K-FAC around any optimizer: gradients are preconditioned once they have been reduced.

Pauloski et al. 2020, "Convolutional Neural Network Training with Distributed K-FAC" (arXiv
2007.00784). ``kfac_layers`` has the means A and G of a layer. P is (A kron G + damping * 1)^-1
applied to W, exactly.

Implemented here, because kfac-pytorch, the authors' own, is in no package index and communicates by
itself, without the deadlines, checkpoints and restarts of all else here; and curvlinops 3.0, which
is maintained, has such matrices for a data set and trains nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparkdl.collective import Collective
from sparkdl.errors import ConfigError, ModelError
from sparkdl.replica import Replica
from sparkdl.strategies.all_reduce.chain import Step, Transform
from sparkdl.strategies.all_reduce.kfac_layers import FactoredLayer, assign, factored_layers
from sparkdl.strategies.arguments import (
    FRACTION,
    POSITIVE,
    STEPS,
    CheckedFields,
    argument,
    number,
    or_none,
)
from sparkdl.strategies.base import Run
from sparkdl.strategies.worker_group import Grid

EARLY_STEPS = 100
"""First steps of a training, in which factors and decompositions are computed more often."""
EARLY_DECOMPOSITIONS_EVERY = 10


@dataclass(frozen=True)
class KFACPreconditioner(CheckedFields):
    """Has ``GradientAllReduce`` precondition the gradients of Linear and Conv2d layers by K-FAC.

    Rule:
        For each layer, with A and G the means of products of its inputs and of its outputs'
        gradients, starting from the identity, and W the gradient of its weights::

            A, G     <-  decay * A + (1 - decay) * (A of this step's rows), also G
            A, G      =  Q_A diag(d_A) Q_A^T,  Q_G diag(d_G) Q_G^T
            V        <-  Q_G^T W Q_A / (d_G d_A^T + damping)
            P        <-  Q_G V Q_A^T
            nu       <-  min(1, sqrt(kl_clip / |sum over layers <P, W> rate^2|))
            W        <-  nu P

    Phases:
        1. The workers' gradients are added up, as without it.
        2. Every ``factors_every`` steps, so are the factors A and G; in each of the first 100.
        3. Every ``decompositions_every`` steps, and at least every 10 of the first 100, each worker
           decomposes the factors assigned to it, and the workers that hold a layer are sent its
           decompositions.
        4. Gradients are preconditioned by those workers, sent on to the others if ``fraction`` is
           below 1, and scaled by nu. The optimizer takes its step on them.

    When:
        Where epochs are expensive and steps are not: large minibatches, models of moderately wide
        layers, one GPU per worker; in the paper ResNet-50 took 55 epochs.

    When not:
        Where layers have many thousand inputs, as the cost of decompositions is cubic in those; nor
        on slow links or for few epochs, where untuned it may well be slower than SGD.

    Learning rates are the optimizer's; the paper uses SGD with momentum 0.9. It has the same
    frequencies from the first step to the last. Factors that begin at the identity are mostly that
    after a few updates (0.95^11 = 57 %), so for the first 100 steps they would precondition next to
    nothing; its authors' later code (KAISA, Pauloski et al. 2021) takes schedules.

    Args:
        damping: > 0; 0.001 in the paper.
        decay: of the factors' means, in [0, 1); 0.95 in the paper.
        factors_every: steps between two updates of the factors after the first 100, >= 1; 10 in
            the paper, on ImageNet.
        decompositions_every: steps between two decompositions after the first 100, >= 1; 100 there,
            10 on CIFAR-10.
        kl_clip: > 0, how far a step may go; 0.001 in the paper. None for no limit.
        fraction: the fraction of workers, in (0, 1], that hold a layer's decompositions: 1 is
            COMM-OPT, which sends nothing between decompositions; below that each holds fewer, and
            preconditioned gradients travel in each step, down to 1 / workers (MEM-OPT). 1 is the
            paper's, and fastest where memory suffices.

    Raises:
        ConfigError: an argument is out of range.
    """

    damping: float = argument(0.001, POSITIVE)
    decay: float = argument(0.95, FRACTION)
    factors_every: int = argument(10, STEPS)
    decompositions_every: int = argument(100, STEPS)
    kl_clip: float | None = argument(0.001, or_none(POSITIVE))
    fraction: float = argument(1.0, number("> 0 and <= 1", lambda share: 0 < share <= 1))

    def require_fits(self, replica: Replica) -> None:
        """Check that there are layers for it, and learning rates to clip their steps by.

        Raises:
            ConfigError: the optimizer has no learning rates.
            ModelError: the model has no layer that it supports.
        """
        _layers(replica)
        if self.kl_clip is None:
            return
        if any("lr" not in group for group in replica.optimizer.param_groups):
            raise ConfigError(
                f"{type(replica.optimizer).__name__} has no learning rate named 'lr', which "
                "K-FAC needs to clip the size of a step. Use SGD, or kl_clip=None"
            )

    def updates_factors(self, step: int) -> bool:
        """Whether the factors are updated in a step, counted from 0."""
        return step < EARLY_STEPS or step % self.factors_every == 0

    def decomposes(self, step: int) -> bool:
        """Whether they are decomposed in a step, counted from 0."""
        every = self.decompositions_every
        if step < EARLY_STEPS:
            every = min(every, EARLY_DECOMPOSITIONS_EVERY)
        return step % every == 0

    def start(self, run: Run) -> Preconditioning:
        """Start collecting; every worker must do so at the same time.

        Raises:
            ModelError: the model has no layer that it supports.
        """
        assert run.collective is not None
        return Preconditioning(self, run, run.collective)


class Preconditioning(Transform):
    """The preconditioner of one worker.

    Args:
        settings: the same on all workers.
        run: this worker's; when it leaves, the model is as before.
        everyone: the group of all workers.

    Attributes:
        layers: by name.
    """

    def __init__(self, settings: KFACPreconditioner, run: Run, everyone: Collective) -> None:
        self._replica = run.replica
        self.layers = _layers(run.replica)
        self._settings = settings
        self._everyone = everyone
        grid = Grid.of(everyone.world_size, settings.fraction)
        self._row, self._column = everyone.within(grid.rows), everyone.within(grid.columns)
        sizes = {name: (each.input_size, each.output_size) for name, each in self.layers.items()}
        row_of, self._decomposers = assign(grid, sizes)
        own_row = everyone.index // grid.width
        self._held = [name for name in self.layers if row_of[name] == own_row]
        device = run.replica.device
        self._factors = {
            name: [torch.eye(size, dtype=self.layers[name].dtype, device=device) for size in pair]
            for name, pair in sizes.items()
        }
        self._sums = {n: [torch.zeros_like(f) for f in fs] for n, fs in self._factors.items()}
        # Of the minibatch under way: its rows, and by layer the sum for G and its positions.
        self._rows = 0
        self._under_way: dict[str, tuple[Tensor, int]] = {}
        # By layer: eigenvectors in columns and eigenvalues, of A and then of G.
        self._decomposed: Mapping[str, Sequence[Tensor]] = {}
        self._seen: set[str] = set()
        """Layers that some worker has called; how the weights of others are used is unknown."""
        self._steps = 0
        self._counts = True
        for name, layer in self.layers.items():
            hook = partial(self._on_forward, name)
            removable = layer.module.register_forward_hook(hook, with_kwargs=True)
            run.cleanup.callback(removable.remove)

    def _on_forward(
        self, name: str, module: nn.Module, given: tuple[Any, ...], named: Any, output: Tensor
    ) -> None:
        """Count the layer's minibatch as soon as the gradient of its outputs is known."""
        counts = self._counts and self._settings.updates_factors(self._steps)
        if counts and output.requires_grad:
            inputs = given[0] if given else named["input"]
            count = partial(self._count, name, inputs.detach())
            output.register_hook(count)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _count(self, name: str, inputs: Tensor, gradients: Tensor) -> None:
        of_a, of_g, positions = self.layers[name].moments(inputs, gradients)
        self._sums[name][0] += of_a
        if name in self._under_way:
            earlier, before = self._under_way[name]
            of_g, positions = of_g + earlier, positions + before
        self._under_way[name] = of_g, positions

    def _end_minibatch(self) -> None:
        """Divide what its calls of each layer have added up to by the positions of a row."""
        for name, (of_g, positions) in self._under_way.items():
            self._sums[name][1] += of_g * (self._rows / max(1, positions))
        self._under_way.clear()

    def before_forward(self, step: Step) -> None:
        """Learn whether the minibatch has rows of the step, or is only run for others."""
        self._end_minibatch()
        self._counts = step.batch is not None
        self._rows = 0 if step.batch is None else step.batch.examples

    @torch.no_grad()
    def after_reduction(self, step: Step) -> None:
        """Overwrite the gradients, which all workers have, with preconditioned ones."""
        self._end_minibatch()
        if self._settings.updates_factors(self._steps):
            self._update_factors(step)
        if self._settings.decomposes(self._steps):
            self._decompose()
        self._steps += 1
        gradients = {name: layer.gradient for name, layer in self.layers.items()}
        there = {
            name: each
            for name, each in gradients.items()
            if each is not None and name in self._seen
        }
        if not there:
            return
        found = [
            _precondition(each, self._settings.damping, *self._decomposed[name])
            if name in self._decomposed
            else torch.zeros_like(each)
            for name, each in there.items()
        ]
        _share(found, self._column)
        nu = self._scale(there, found, step.gain)
        for name, values in zip(there, found, strict=True):
            self.layers[name].set_gradient(values * nu)

    def _update_factors(self, step: Step) -> None:
        rows, workers, decay = step.total, self._everyone.world_size, self._settings.decay
        sums = [total for pair in self._sums.values() for total in pair]
        _share(sums, self._everyone)
        for name, (sum_a, sum_g) in self._sums.items():
            if not sum_a.any():
                continue
            self._seen.add(name)
            # The gradients of a row's loss are those of loss * workers / rows, but for the factor.
            now = sum_a / rows, sum_g * (rows * (step.factor / workers) ** 2)
            for factor, moment in zip(self._factors[name], now, strict=True):
                factor.lerp_(moment, 1 - decay)
        for total in sums:
            total.zero_()

    def _decompose(self) -> None:
        own = self._everyone.rank
        found: dict[str, list[Tensor]] = {}
        for name in self._held:
            found[name] = []
            for factor, rank in zip(self._factors[name], self._decomposers[name], strict=True):
                if rank == own:
                    values, vectors = torch.linalg.eigh(factor)
                    values.clamp_(min=0.0)
                else:
                    values, vectors = torch.zeros_like(factor[0]), torch.zeros_like(factor)
                found[name] += [vectors.contiguous(), values]
        self._hold(found)

    def _hold(self, found: Mapping[str, Sequence[Tensor]]) -> None:
        """Share what each worker of the row has decomposed, with zeros in the others' places."""
        _share([each for parts in found.values() for each in parts], self._row)
        self._decomposed = found

    def _scale(
        self, gradients: Mapping[str, Tensor], found: Sequence[Tensor], gain: float
    ) -> float:
        clip = self._settings.kl_clip
        if clip is None:
            return 1.0
        groups = self._replica.optimizer.param_groups
        rates = {id(p): float(g["lr"]) for g in groups for p in g["params"]}
        products = [
            # 0 for those that the optimizer was not given.
            torch.sum(values * gradient) * rates.get(id(self.layers[name].module.weight), 0.0) ** 2
            for (name, gradient), values in zip(gradients.items(), found, strict=True)
        ]
        length = abs(float(torch.stack(products).sum())) * gain**2
        return min(1.0, math.sqrt(clip / length)) if length else 1.0

    def saved(self) -> dict[str, Any]:
        """For ``restore``: what the worker that decomposes a factor has of it."""
        own = self._everyone.rank
        state: dict[str, Any] = {"kfac.steps": self._steps, "kfac.seen": sorted(self._seen)}
        for name, ranks in self._decomposers.items():
            held = self._decomposed.get(name)
            for k, letter in enumerate("ag"):
                if ranks[k] != own:
                    continue
                state[f"kfac.{letter}.{name}"] = self._factors[name][k]
                if held is not None:
                    q, d = f"kfac.q_{letter}.{name}", f"kfac.d_{letter}.{name}"
                    state[q], state[d] = held[2 * k : 2 * k + 2]
        return state

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Any]) -> None:
        """Resume from what each worker has saved; all must do so at the same time."""
        self._steps, self._seen = saved["kfac.steps"], set(saved["kfac.seen"])
        for name, factors in self._factors.items():
            for letter, factor in zip("ag", factors, strict=True):
                mine = saved.get(f"kfac.{letter}.{name}")
                factor.zero_() if mine is None else factor.copy_(mine)
        _share([factor for pair in self._factors.values() for factor in pair], self._everyone)
        if not self._steps:
            return
        found: dict[str, list[Tensor]] = {}
        for name in self._held:
            found[name] = []
            for letter, factor in zip("ag", self._factors[name], strict=True):
                for part, like in (("q", factor), ("d", factor[0])):
                    mine = saved.get(f"kfac.{part}_{letter}.{name}")
                    empty = torch.zeros_like(like)
                    found[name].append(empty if mine is None else empty.copy_(mine))
        self._hold(found)


def _precondition(
    gradient: Tensor, damping: float, q_a: Tensor, d_a: Tensor, q_g: Tensor, d_g: Tensor
) -> Tensor:
    turned = q_g.T @ gradient @ q_a
    turned /= torch.outer(d_g, d_a) + damping
    return q_g @ turned @ q_a.T


def _layers(replica: Replica) -> dict[str, FactoredLayer]:
    found = factored_layers(replica.module)
    if not found:
        raise ModelError(
            f"{type(replica.module).__name__} has no Linear or Conv2d layer for K-FAC to "
            "precondition: drop the preconditioner"
        )
    return found


def _share(parts: Sequence[Tensor], group: Collective) -> None:
    """Overwrite tensors with the sums over a group, in one message for each dtype."""
    if group.world_size == 1:
        return
    for dtype in dict.fromkeys(part.dtype for part in parts):
        alike = [part for part in parts if part.dtype == dtype]
        flat = group.all_reduce(torch.cat([part.reshape(-1) for part in alike]))
        sizes = [part.numel() for part in alike]
        for part, values in zip(alike, torch.split(flat, sizes), strict=True):
            part.copy_(values.view(part.shape))
