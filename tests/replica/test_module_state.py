"""A module is put back to what it held."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor, nn

from sparkdl.replica.buffers import ModuleState, tensors_of


class Holds(nn.Module):
    """Has one of each kind of attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.BatchNorm1d(2)
        self.plain, self.names, self.recent = torch.zeros(2), {"a"}, deque([1, 2], maxlen=2)
        self.by_name = {"mean": torch.ones(2)}


def contents(module: nn.Module) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors_of(module)]


def never() -> list[Tensor]:
    raise AssertionError("nothing was written to")


def test_tensors_written_to_in_place_hold_again_what_they_held_as_often_as_they_are() -> None:
    module = Holds()
    state, held = ModuleState(module), contents(module)
    for _ in range(2):
        module.layer(torch.randn(8, 2))
        module.plain += 1
        module.by_name["mean"].mul_(3)
        state.put_back(lambda: held)
        assert all(torch.equal(a, b) for a, b in zip(tensors_of(module), held, strict=True))


def test_attributes_and_what_they_hold_are_the_very_ones_that_they_were() -> None:
    """Also of a module that was made in inference mode; what is new goes."""
    with torch.inference_mode():
        in_inference = Holds()
    for module in (Holds(), in_inference):
        state, before, recent = ModuleState(module), tensors_of(module), module.recent
        module.layer.running_mean = torch.full((2,), 9.0)
        module.plain = module.plain + 1
        module.by_name["mean"] = torch.zeros(2)
        module.names.add("b")
        module.recent.append(3)
        module.cache = torch.zeros(3)
        module.register_buffer("other", torch.zeros(3))
        state.put_back(never)
        assert all(a is b for a, b in zip(tensors_of(module), before, strict=True))
        assert (module.names, list(module.recent)) == ({"a"}, [1, 2])
        assert module.recent is recent
        assert not hasattr(module, "cache")
        assert not hasattr(module, "other")
