"""Modules that have moved since files that name their contents were first written.

A saved stage names its strategy by import path, and so does a training's identity. Both are read
for years, so a module listed here is also found under its former name.
"""

from __future__ import annotations

_FORMER = {
    "sparkdl.strategies.all_reduce.adascale": "sparkdl.strategies.adascale",
    "sparkdl.strategies.all_reduce.gradient_all_reduce": "sparkdl.strategies.gradient_all_reduce",
    "sparkdl.strategies.asynchronous.asynchronous_outer_optimizer": (
        "sparkdl.strategies.asynchronous_outer_optimizer"
    ),
    "sparkdl.strategies.asynchronous.asynchronous_sgd": "sparkdl.strategies.asynchronous_sgd",
    "sparkdl.strategies.asynchronous.barriers": "sparkdl.strategies.barriers",
    "sparkdl.strategies.elastic.elastic_averaging": "sparkdl.strategies.elastic_averaging",
    "sparkdl.strategies.gossip.gossip_averaging": "sparkdl.strategies.gossip_averaging",
    "sparkdl.strategies.outer.outer_optimizer": "sparkdl.strategies.outer_optimizer",
    "sparkdl.strategies.threshold.threshold_gradient_sharing": (
        "sparkdl.strategies.threshold_gradient_sharing"
    ),
}
"""Each module's first name, by its present name."""
_PRESENT = {former: present for present, former in _FORMER.items()}


def former_name(module: str) -> str:
    """A module's first name, which identities go by."""
    return _FORMER.get(module, module)


def present_name(module: str) -> str:
    """The present name of a module that a file names."""
    return _PRESENT.get(module, module)
