"""Modules that have moved since files were first written that name what is in them.

A saved stage names its strategy by import path, and so does the identity of a training. Both are
read for years; so a module that is listed here is found under its former name, too.
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
"""By the name of a module the one that it had first."""
_PRESENT = {former: present for present, former in _FORMER.items()}


def former_name(module: str) -> str:
    """The name that a module had first, which identities go by."""
    return _FORMER.get(module, module)


def present_name(module: str) -> str:
    """The name of the module that a file means."""
    return _PRESENT.get(module, module)
