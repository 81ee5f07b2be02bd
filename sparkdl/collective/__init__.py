"""torch.distributed groups across workers: rendezvous, backend choice, complete cleanup."""

from sparkdl.collective.group import Collective, join_collective, release_model
from sparkdl.collective.network import Network
from sparkdl.collective.rendezvous import Gather

__all__ = ["Collective", "Gather", "Network", "join_collective", "release_model"]
