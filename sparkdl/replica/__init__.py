"""One replica: model + optimizer + device, with its state in a few flat buffers."""

from sparkdl.replica.calling import align_targets, forward
from sparkdl.replica.flat import flatten
from sparkdl.replica.replica import Precision, Replica

__all__ = ["Precision", "Replica", "align_targets", "flatten", "forward"]
