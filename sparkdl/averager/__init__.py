"""The driver's side of averaging, and how workers reach it."""

from sparkdl.averager.client import AveragerClient
from sparkdl.averager.service.server import Averager
from sparkdl.transport.connecting import ServiceAddress

__all__ = ["Averager", "AveragerClient", "ServiceAddress"]
