"""A model that executors receive once, and load once per Python process."""

from __future__ import annotations

import gc
import hashlib
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle
import torch
from pyspark.sql import SparkSession
from torch import nn

from sparkdl.checkpoint.portable import pickled_module
from sparkdl.errors import ConfigError
from sparkdl.process.torch_settings import TorchSettings
from sparkdl.replica.buffers import ModuleState, tensors_of
from sparkdl.spark.arrival import Shipment, arrive, importable
from sparkdl.spark.catalyst.broadcasts import is_of_running_session
from sparkdl.spark.catalyst.jvm import Broadcast
from sparkdl.spark.sending import SentBytes, broadcast_scope, send
from sparkdl.spark.shipping import ship
from sparkdl.user_code.needed_modules import ReferencePickler, advice
from sparkdl.user_code.tracebacks import add_note

OF_ANOTHER_SESSION = (
    "this function was made by model.udf() in a Spark session that has been stopped, whose "
    "executors had the model: call model.udf() again, and register what it returns"
)


@dataclass(frozen=True, slots=True)
class SharedModel:
    """A model that every executor receives once.

    Attributes:
        key: its name in the executors' Python processes: the hash of what was pickled.
        pickled: the nn.Module; see ``checkpoint.portable``.
        shipment: the user's own modules that it needs.
    """

    key: str
    pickled: SentBytes
    shipment: Shipment | None

    def __reduce__(self) -> tuple[Any, ...]:
        """Called when a function that Spark has registered or called is sent to the executors.

        Raises:
            ConfigError: the executors that have the model are those of a session that has ended.
        """
        sent = self.pickled
        if isinstance(sent, Broadcast) and not is_of_running_session(sent):
            raise ConfigError(OF_ANOTHER_SESSION)
        return type(self), (self.key, self.pickled, self.shipment)


class ModelSharing:
    """Sends a model to the executors, once as long as nothing about it changes."""

    def __init__(self) -> None:
        self._last: tuple[Any, SharedModel] | None = None

    def share(
        self,
        module: nn.Module,
        builder: Any,
        seed: int | None,
        spark: SparkSession,
        *,
        ship_modules: bool,
        used: set[str],
    ) -> SharedModel:
        """Send a model as it is now, unless this application's executors already have it.

        Args:
            module: it may have been trained further, or differ from the last one.
            builder: what built it.
            seed: of the random numbers that it drew; None if unknown.
            spark: of the application, which may differ from the last one.
            ship_modules: whether the user's own modules are sent with it.
            used: names of what is sent alongside refers to; those of the model are added.

        Raises:
            ModelError: it cannot be pickled.
            ConfigError: a module's text has changed since it was imported.
        """
        pickled = pickled_module(
            module, builder, lambda file: ReferencePickler(file, used), seed=seed
        )
        shipment = ship(used, spark) if ship_modules else None
        digest = hashlib.sha256(pickled)
        digest.update(b"" if shipment is None else shipment.digest.encode())
        key = digest.hexdigest()
        if self._last is not None:
            known, shared = self._last
            if known is broadcast_scope(spark) and shared.key == key:
                return shared
        shared = SharedModel(key, send(spark, pickled), shipment)
        self._last = broadcast_scope(spark), shared
        return shared


class _Loaded(NamedTuple):
    """A model in this Python process, which Spark reuses, with what it has imported."""

    key: tuple[str, str, torch.dtype | None, bool]
    module: nn.Module
    state: ModuleState
    imported: dict[str, types.ModuleType]


_last: _Loaded | None = None
"""The last model that this process used."""


@contextmanager
def loaded(
    model: SharedModel,
    device: str,
    dtype: torch.dtype | None,
    settings: TorchSettings,
    *,
    compiled: bool,
) -> Iterator[nn.Module]:
    """The module, unpickled once in this process for all of its tasks; in evaluation mode.

    Each task finds it as it was sent, whatever forward has counted or kept in earlier tasks: which
    of those ran in this process is chance.

    Args:
        model: as it was shared.
        device: where to put it.
        dtype: of its floating-point parameters and buffers; None for their own.
        settings: the driver's torch settings, for a module that must be built again.
        compiled: whether to use ``torch.compile``, with dynamic batch sizes from the start, since
            pieces of files have many.
    """
    global _last
    key = (model.key, device, dtype, compiled)
    known = _last is not None and _last.key == key
    imported = _last.imported if _last is not None and known else {}
    with importable(arrive(model.shipment), imported):
        try:
            if _last is None or not known:
                gc.unfreeze()
                _last = None  # never two of them
                module = _unpickled(model, settings).to(device=device, dtype=dtype).eval()
                if compiled:
                    module.compile(dynamic=True)
                _last = _Loaded(key, module, ModuleState(module), imported)
            else:
                _last.state.put_back(lambda: tensors_of(_unpickled(model, settings)))
            yield _last.module
        except ModuleNotFoundError as error:
            add_note(error, advice(error))
            raise
        finally:
            if not known:
                _spare_collections()


def _unpickled(model: SharedModel, settings: TorchSettings) -> nn.Module:
    with settings.hold():
        module: nn.Module = cloudpickle.loads(model.pickled.value)
    return module


def _spare_collections() -> None:
    """Exempt long-lived objects from garbage collection: torch, and what a model imports.

    Spark collects after every task of a process that it reuses, which took 0.15 s each time.
    """
    gc.collect()
    gc.freeze()
