"""Top-k: only the largest entries of each gradient are sent, and the others later.

Aji and Heafield 2017, "Sparse Communication for Distributed Gradient Descent"; Stich, Cordonnier
and Jaggi 2018, "Sparsified SGD with Memory". Workers choose for themselves, so the mean of R
workers may have R times k entries. Nothing is rounded: s_r + e_r = M_r to the bit. The mean is
formed in the order of ranks, the same on each worker.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkdl.collective import Collective
from sparkdl.replica import Replica
from sparkdl.strategies.arguments import argument, number, whole
from sparkdl.strategies.compression.base import Compression, Compressor


@dataclass(frozen=True)
class TopK(Compression):
    """Send the largest entries of each gradient: ``compression=TopK(0.01)``.

    Rule:
        With g_r the gradient of worker r, of R, for a parameter of n entries, its error e_r, and
        k = ceil(fraction * n)::

            M_r  <-  g_r + e_r
            s_r  <-  the k entries of M_r that are largest in magnitude, and 0 elsewhere
            e_r  <-  M_r - s_r           and every optimizer steps on (s_1 + ... + s_R) / R

    Phases:
        1. For ``start_after`` steps the workers add up whole gradients.
        2. In each step after that, once the backward pass is done, each finds its largest entries,
           and keeps the rest.
        3. They gather the positions and values of all workers' entries, and step on the mean.

    When:
        For few workers on slow links, and for gradients that are mostly near zero, such as those of
        embeddings.

    When not:
        For many workers, as what each receives grows with their number, unlike with ``PowerSGD``;
        nor with much momentum, which late entries miss, as there is no momentum correction (Lin et
        al. 2018, "Deep Gradient Compression").

    Args:
        fraction: the part of each parameter's entries that a worker sends, > 0 and <= 1; at least
            one entry. Aji and Heafield send 1 %. 1 gives the mean of all gradients, at twice their
            bytes.
        start_after: optimizer steps with whole gradients at first, >= 0; Stich et al. have none.

    Raises:
        ConfigError: an argument is out of range.
    """

    fraction: float = argument(
        0.01, number("> 0 and <= 1, the share of entries sent", lambda share: 0 < share <= 1)
    )
    start_after: int = argument(0, whole(0, "steps"))

    def entries(self, numel: int) -> int:
        """How many entries of a parameter a worker sends: k."""
        return math.ceil(self.fraction * numel)

    def compressor(self, collective: Collective, replica: Replica) -> Compressor:
        """One worker's part."""
        return _Largest(collective, self)


class _Largest(Compressor):
    """One worker's errors.

    Args:
        collective: the group of all workers.
        settings: how much is sent.
    """

    def __init__(self, collective: Collective, settings: TopK) -> None:
        super().__init__(collective, settings.start_after)
        self._settings = settings

    def average(self, gradients: Mapping[int, Tensor]) -> None:
        """Overwrite gradients with the mean of the entries that all workers send."""
        places, values, counts = [], [], []
        for place, gradient in gradients.items():
            whole = self.with_error(place, gradient).reshape(-1)
            count = self._settings.entries(len(whole))
            where = whole.abs().topk(count, sorted=False).indices
            places.append(where)
            values.append(whole[where])
            counts.append(count)
            whole[where] = 0
            self.errors[place] = whole

        means = [torch.zeros_like(self.errors[place]) for place in gradients]
        wide_enough = place_dtype([len(mean) for mean in means])
        every_place = self.collective.all_gather(torch.cat(places).to(wide_enough))
        every_value = self.collective.all_gather(torch.cat(values))
        for of_one, sent in zip(every_place, every_value, strict=True):
            parts = zip(means, torch.split(of_one, counts), torch.split(sent, counts), strict=True)
            for mean, where, value in parts:
                # No entry occurs twice, so a GPU cannot add in another order.
                mean.index_add_(0, where, value)
        for mean, gradient in zip(means, gradients.values(), strict=True):
            mean.div_(self.collective.world_size)
            gradient.copy_(mean.view(gradient.shape))


def place_dtype(entries: Sequence[int]) -> torch.dtype:
    """The integer type in which positions are sent: 4 bytes, unless a parameter is too large.

    Args:
        entries: of each parameter; the same on all workers, and so is the answer.
    """
    last = max(entries, default=0) - 1
    return torch.int32 if last <= torch.iinfo(torch.int32).max else torch.int64
