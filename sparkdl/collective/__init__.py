"""torch.distributed groups across workers: rendezvous, choice of backend, complete clean-up."""

from sparkdl.collective.group import Collective, join_collective, release_model
from sparkdl.collective.network import Network

__all__ = ["Collective", "Network", "join_collective", "release_model"]
