"""One replica: model + optimizer + device, with its state in a few flat buffers."""

from sparkdl.replica.flat import flatten
from sparkdl.replica.replica import Precision, Replica, forward

__all__ = ["Precision", "Replica", "flatten", "forward"]
