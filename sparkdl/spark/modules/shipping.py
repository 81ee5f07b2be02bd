"""Sends the user's own modules to the executors, once for as long as they stay the same.

They travel as a Spark broadcast: it goes once to each executor, even to one that restarts or comes
later, and Spark protects it as it protects its tasks. ``addPyFile`` would leave a file in the
session for good, and could not replace it with another version.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from pyspark import Broadcast, SparkContext, SparkFiles

from sparkdl.spark.modules.bundle import Bundle, collect
from sparkdl.spark.modules.shipment import Shipment, Shipped
from sparkdl.spark.modules.texts import Texts
from sparkdl.spark.modules.units import Finder
from sparkdl.user_code.missing_modules import HOW_OTHERS_TRAVEL

logger = logging.getLogger(__name__)

KEPT = 8
"""How many of the sets of modules sent last have their broadcasts kept."""


def ship(
    names: Iterable[str],
    context: SparkContext,
    first: Sequence[str] = (),
    *,
    refuse_edited: bool = False,
) -> Shipment | None:
    """Send what some names need, unless the executors have it.

    Args:
        names: dotted names, as ``references`` notes them.
        context: the application's Spark context.
        first: folders to search before all others, as Python searches a script's folder.
        refuse_edited: whether to refuse a module whose file has changed since it was imported,
            even if the imported text is known.

    Returns:
        What a task needs to get them; None if nothing of the user's own is needed.

    Raises:
        ConfigError: a module's text has changed since it was imported.
    """
    with _lock:
        bundle = collect(names, Finder(first, _sent(context)), _texts, refuse_edited=refuse_edited)
        if not bundle.units and not bundle.left_out:
            return None
        _warn(bundle)
        return Shipment(
            digest=bundle.digest,
            units=tuple(
                Shipped(unit.name, unit.relative, None if unit.archive else unit.base)
                for unit in bundle.units.values()
            ),
            archive=_broadcast(bundle, context) if bundle.units else None,
            left_out=tuple(bundle.left_out.items()),
        )


_lock = threading.Lock()
_texts = Texts()
_told: set[str] = set()
_sent_last: tuple[SparkContext, OrderedDict[str, Broadcast[bytes]]] | None = None


def _broadcast(bundle: Bundle, context: SparkContext) -> Broadcast[bytes]:
    global _sent_last
    if _sent_last is None or _sent_last[0] is not context:
        _sent_last = context, OrderedDict()
    known, digest = _sent_last[1], bundle.digest
    if digest not in known:
        archive = bundle.archive()
        logger.info(
            "sending %s to the executors: %d files, %d bytes",
            ", ".join(bundle.units),
            len(bundle.files),
            len(archive),
        )
        known[digest] = context.broadcast(archive)
        while len(known) > KEPT:
            known.popitem(last=False)
    known.move_to_end(digest)
    return known[digest]


def _sent(context: SparkContext) -> list[str]:
    """Where the driver keeps what Spark itself sends to the executors."""
    archives = context.getConf().get("spark.submit.pyFiles", "") or ""
    names = [PurePosixPath(each).name for each in archives.split(",") if each]
    return [SparkFiles.getRootDirectory(), *names]


def _warn(bundle: Bundle) -> None:
    """Say once what stays."""
    told = [
        f"the module {name} {reason}, so it is not sent to the executors. {HOW_OTHERS_TRAVEL}"
        for name, reason in bundle.left_out.items()
    ]
    if bundle.too_large:
        shown = ", ".join(bundle.too_large[:5])
        told.append(
            f"{len(bundle.too_large)} data files in your packages are too large to send to the "
            f"executors, or have unusual names: {shown}. Read them from a path that all hosts "
            "have, or add them with spark.sparkContext.addFile"
        )
    for text in told:
        if text not in _told:
            _told.add(text)
            logger.warning("%s", text)
