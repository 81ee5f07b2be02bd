"""PowerSGD: each matrix of gradients is sent as two factors of low rank.

Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization"
(arXiv 1905.13727), algorithms 1 and 2. Q is kept for the next step, which continues this one's
power iteration (warm start). Both means are linear in the M_r: P Q^T is what one worker would get
from the mean of all M_r. The error is what the mean lacks of this worker's M, as in torch's
``powerSGD_hook``; the authors' code takes M_r - P (M_r^T P)^T, whose mean is the same.

Top-k: only the largest entries of each gradient are sent, and the others later.

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
from sparkdl.strategies.all_reduce.compression import Compression, Compressor
from sparkdl.strategies.arguments import argument, number, whole


@dataclass(frozen=True)
class PowerSGD(Compression):
    """Send low-rank factors in place of matrices of gradients: ``compression=PowerSGD(2)``.

    Rule:
        With g_r the gradient of worker r for a parameter as a matrix of n rows and m columns (for a
        convolution, one row per output channel), its error e_r, and Q of m rows and as many columns
        as the rank::

            M_r  <-  g_r + e_r
            P    <-  orthonormal columns of  mean over r of  M_r Q
            Q    <-  mean over r of  M_r^T P
            e_r  <-  M_r - P Q^T          and every optimizer steps on P Q^T

    Phases:
        1. For ``start_after`` steps the workers add up whole gradients.
        2. In each step after that, once the backward pass is done, they add up M Q of all matrices,
           and make the columns orthonormal.
        3. They add up M^T P, and what is not compressed.
        4. Each keeps what P Q^T lacks of its own, and steps.

    When:
        For large matrices on a network that cannot carry them in every step.

    When not:
        For models of small layers or of one long vector, where nothing is compressed; nor where
        workers may as well train some steps alone, which sends less for less arithmetic.

    Args:
        rank: columns of the factors, >= 1, or as many as the matrix has rows or columns if those
            are fewer. 1 to 4 are usual, up to 32 for language models (torch's documentation); the
            paper has 4 for its LSTM. If a model learns too little, double it.
        start_after: optimizer steps with whole gradients at first, >= 0: early gradients change
            fast. torch advises about a tenth of all steps, and no fewer than the learning rate's
            warm-up.
        min_compression_rate: the factor by which a matrix must shrink, >= 0: one of n rows and m
            columns is sent whole unless (n + m) * rank * rate < n * m. 2 in torch; 0 compresses
            every matrix.

    Raises:
        ConfigError: an argument is out of range.
    """

    rank: int = argument(2, whole(1))
    start_after: int = argument(10, whole(0, "steps"))
    min_compression_rate: float = argument(2.0, number(">= 0", lambda rate: rate >= 0))

    def compresses(self, shape: torch.Size) -> bool:
        """Whether a gradient of some shape is sent as factors."""
        if len(shape) < 2 or not shape.numel():
            return False
        rows, columns = shape[0], shape.numel() // shape[0]
        return (rows + columns) * self.rank * self.min_compression_rate < rows * columns

    def compressor(self, collective: Collective, replica: Replica) -> Compressor:
        """One worker's part."""
        return _PowerIteration(collective, self)


class _PowerIteration(Compressor):
    """One worker's errors, and the Q that all workers have.

    Args:
        collective: the group of all workers.
        settings: what is compressed, and how much.
    """

    def __init__(self, collective: Collective, settings: PowerSGD) -> None:
        super().__init__(collective, settings.start_after)
        self._settings = settings
        self._right: dict[int, Tensor] = {}
        self.memories["right"] = self._right

    def average(self, gradients: Mapping[int, Tensor]) -> None:
        """Overwrite matrices with P Q^T, and other gradients with their mean."""
        compresses = self._settings.compresses
        whole = [each for each in gradients.values() if not compresses(each.shape)]
        for gradient, mean in zip(whole, self.mean(whole), strict=True):
            gradient.copy_(mean)

        matrices = {
            place: self.with_error(place, gradient).reshape(len(gradient), -1)
            for place, gradient in gradients.items()
            if compresses(gradient.shape)
        }
        lefts = self.mean([each @ self._basis(place, each) for place, each in matrices.items()])
        lefts = [orthonormal(left) for left in lefts]
        rights = self.mean(
            [each.T @ left for each, left in zip(matrices.values(), lefts, strict=True)]
        )
        for (place, matrix), left, right in zip(matrices.items(), lefts, rights, strict=True):
            agreed = left @ right.T
            gradients[place].copy_(agreed.view(gradients[place].shape))
            self.errors[place] = matrix.sub_(agreed)
            # A view would keep the whole message alive.
            self._right[place] = right.clone()

    def _basis(self, place: int, matrix: Tensor) -> Tensor:
        """The orthonormal columns to multiply M by, which leave P its magnitude."""
        right = self._right.get(place)
        if right is None:
            right = first_right(place, matrix.shape, self._settings.rank).to(matrix)
        return orthonormal(right)


def first_right(place: int, shape: torch.Size, rank: int) -> Tensor:
    """Q before the first step: normal numbers, the same on every worker and in every training.

    Args:
        place: the parameter's among the trained ones; each has its own numbers.
        shape: of its matrix, (rows, columns).
        rank: how many columns, if the matrix has that many rows and columns.

    Returns:
        Shape (columns, rank), float64.
    """
    generator = torch.Generator().manual_seed(place)
    return torch.randn(shape[1], min(rank, *shape), generator=generator, dtype=torch.float64)


def orthonormal(matrix: Tensor) -> Tensor:
    """Orthonormal columns that span a matrix's columns, and more if those are dependent.

    Args:
        matrix: shape (n, k) with n >= k.
    """
    basis: Tensor = torch.linalg.qr(matrix).Q
    return basis


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
