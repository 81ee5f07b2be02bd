"""Buffers that no state dict has are each replica's own."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from toys import classification, make_job, mlp

from sparkdl.strategies import ParameterAveraging
from sparkdl.testing import run_world


class Scaled(nn.Module):
    """Multiplies by a table of ones, which is zeros before the first forward pass if it is kept."""

    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.net, self.kept, self.longest = mlp(), kept, 0
        self.register_buffer("table", torch.zeros(3, 1).double(), persistent=False)
        self.table: Tensor

    def forward(self, features: Tensor) -> Tensor:
        if not self.kept or len(features) > self.longest:
            self.longest = len(features)
            self.table = torch.ones(len(features), 1).double()
        outputs: Tensor = self.net(features * self.table[: len(features)])
        return outputs


def test_a_cache_that_fits_one_replica_only_is_worth_as_much_as_none() -> None:
    shards = classification([12, 3]).shards()
    ended = []
    for kept in (True, False):
        job = make_job(partial(Scaled, kept), strategy=ParameterAveraging(1), epochs=3)
        ended.append(run_world(job, shards).module.state_dict())
    assert all(torch.equal(ended[0][name], ended[1][name]) for name in ended[1])
