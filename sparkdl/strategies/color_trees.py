"""How workers add up values among themselves, where it is not as the backend does it."""

from __future__ import annotations

from dataclasses import dataclass

from sparkdl.collective import Collective
from sparkdl.collective.tree_sum import TreeSum
from sparkdl.errors import ConfigError
from sparkdl.replica import Replica
from sparkdl.strategies.arguments import CheckedFields, argument, instance, number, whole


@dataclass(frozen=True)
class ColorTrees(CheckedFields):
    """Has workers add up values along several trees, in the place of gloo's ring.

    For averaging among executors and ``GradientAllReduce``, on CPUs. Trees have fewer messages
    that wait for each other than a ring, each of which takes the processors longer; the sum differs
    by rounding.

    Args:
        colors: number of trees, each with its part of the values, and of a node's children, >= 1.
            For N workers the largest k up to it is taken for which N mod k is 0 or 1, and no worker
            then has children in two trees.
        chunk_kb: KB that travel in one message, > 0; smaller ones keep all levels of a tree busy
            earlier, larger ones take the processors less time.

    Raises:
        ConfigError: an argument is out of range.
    """

    colors: int = argument(4, whole(1, "trees"))
    chunk_kb: float = argument(256, number("of KB > 0", lambda kb: kb > 0))

    def among(self, workers: Collective) -> TreeSum:
        """What adds up tensors; each of the workers has to make it."""
        return workers.in_trees(self.colors, int(self.chunk_kb * 1024))


REDUCTION = instance(ColorTrees | None, "None or a ColorTrees")
"""The rule for an argument ``reduction``."""


def require_no_gpu(reduction: ColorTrees | None, replica: Replica) -> None:
    """Refuse trees of ours on GPUs."""
    if reduction is not None and replica.device.type != "cpu":
        raise ConfigError(
            f"reduction={reduction!r} is for CPUs, but the replica is on {replica.device}: NCCL "
            "has double binary trees of its own, and chooses between them and rings by size. Drop "
            "reduction"
        )
