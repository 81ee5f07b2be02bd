"""Where an array is: what tensorstore opens there, and in words what it cannot do.

Every wait for a store ends.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sparkdl.errors import DataError, SetupError, SparkDLError
from sparkdl.redaction import shown, without_credentials

Place = str | os.PathLike[str] | Mapping[str, Any]
"""A path, a URL as tensorstore takes it, or its JSON specification."""

OPENING_S = 120.0
"""How long to wait for a store until an array is opened, or a record is read or written."""
DATA_S = 900.0
"""How long to wait until some blocks are read or written, or all records are listed."""
FOLDER = ".sparkdl/"
"""Where records lie in the folder of an output."""


def tensorstore() -> Any:
    """The package.

    Raises:
        SetupError: it is not installed.
    """
    try:
        import tensorstore
    except ImportError as error:
        raise SetupError(
            "transform_volume reads and writes arrays by tensorstore, which is not installed here: "
            "pip install 'sparkdl-torch[volumes]', on the driver and on all executors"
        ) from error
    return tensorstore


@contextmanager
def said(what: str, place: Place) -> Iterator[None]:
    """Say in words what tensorstore could not do.

    Raises:
        DataError: it could not.
    """
    try:
        yield
    except (ValueError, OSError, TimeoutError, NotImplementedError, OverflowError) as error:
        if isinstance(error, SparkDLError):
            raise
        told = re.split(r" \[(?:tensorstore_spec|source locations)=", str(error))[0]
        raise DataError(
            f"{shown(place)} cannot be {what} (on {socket.gethostname()}): "
            f"{without_credentials(told)}"
        ) from error


def answered(future: Any, seconds: float = OPENING_S) -> Any:
    """Wait for a store's answer.

    Raises:
        TimeoutError: there is none in time.
    """
    try:
        return future.result(timeout=seconds)
    except TimeoutError:
        future.cancel()
        raise TimeoutError(f"the store has not answered in {seconds:.0f} s") from None


def specification(place: Place) -> dict[str, Any]:
    """What tensorstore opens.

    Raises:
        DataError: it cannot be understood.
    """
    if isinstance(place, Mapping):
        return dict(place)
    path = re.sub("^s3[an]://", "s3://", os.fspath(place))
    if "://" not in path:
        path = os.path.join(os.path.abspath(path), "")
        return {"driver": "auto", "kvstore": {"driver": "file", "path": path}}
    with said("understood", place):
        found: dict[str, Any] = tensorstore().Spec(path).to_json()
    return found


def root_of(place: Place) -> Any:
    """The folder of an output, as a key-value store.

    Raises:
        DataError: it cannot be opened.
    """
    library = tensorstore()
    with said("opened", place):
        store = library.Spec(specification(place)).kvstore
        if store.path and not store.path.endswith("/"):  # a URL, whose format is not known yet
            store.path += "/"
        return answered(library.KvStore.open(store))
