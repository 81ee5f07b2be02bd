"""The driver's side of averaging, and the workers' way to it."""

from sparkdl.averager.address import AveragerAddress
from sparkdl.averager.client import AveragerClient
from sparkdl.averager.server import Averager

__all__ = ["Averager", "AveragerAddress", "AveragerClient"]
