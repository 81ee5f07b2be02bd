"""torch.distributed groups across workers: rendezvous, backend choice, complete cleanup."""

from sparkdl.collective.group import Collective, join_collective, release_model
from sparkdl.collective.network import Network

__all__ = ["Collective", "Network", "join_collective", "release_model"]
