"""A model that executors receive once, and load once in each of their Python processes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from pyspark import Broadcast, SparkContext
from torch import nn

from sparkdl.checkpoint.portable import pickled_module


@dataclass(frozen=True, slots=True)
class SharedModel:
    """A model that every executor receives once.

    Attributes:
        key: names it in the executors' Python processes: the hash of what was pickled.
        pickled: the nn.Module; see ``checkpoint.portable``.
    """

    key: str
    pickled: Broadcast[bytes]


class ModelSharing:
    """Sends a model to the executors, once for as long as nothing about it changes."""

    def __init__(self) -> None:
        self._last: tuple[SparkContext, SharedModel] | None = None

    def share(self, module: nn.Module, builder: Any, context: SparkContext) -> SharedModel:
        """Send a model as it is now, unless this application's executors have it.

        Args:
            module: it may have been trained further, or be another one than before.
            builder: what has built it.
            context: of the application, which may be another one than before.

        Raises:
            ModelError: it cannot be pickled.
        """
        pickled = pickled_module(module, builder)
        key = hashlib.sha256(pickled).hexdigest()
        if self._last is not None:
            known, shared = self._last
            if known is context and shared.key == key:
                return shared
        shared = SharedModel(key, context.broadcast(pickled))
        self._last = context, shared
        return shared


_loaded: dict[tuple[str, str, torch.dtype | None], nn.Module] = {}
"""The last model used in this Python process; Spark reuses the process."""


def load(model: SharedModel, device: str, dtype: torch.dtype | None) -> nn.Module:
    """The module, unpickled once in this process for all of its tasks; in evaluation mode.

    Args:
        model: as it was shared.
        device: where it is to be.
        dtype: of its floating-point parameters and buffers; None for those that they have.
    """
    key = (model.key, device, dtype)
    if key not in _loaded:
        module: nn.Module = cloudpickle.loads(model.pickled.value)
        _loaded.clear()
        _loaded[key] = module.to(device=device, dtype=dtype).eval()
    return _loaded[key]
