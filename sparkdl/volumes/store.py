"""The arrays that are read and written, by tensorstore, and the records of what is done.

Zarr 2 and 3, N5 and Neuroglancer's precomputed volumes, in files, S3, GCS or whatever else
tensorstore opens; what it cannot open is said in words. Its N5 and precomputed arrays have the
fastest axis first; they are turned round, so that everybody here sees (channels, z, y, x), from
position 0. Every wait for a store ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparkdl.errors import ConfigError, DataError, SparkDLError, required
from sparkdl.feed.conversion import first_lost
from sparkdl.redaction import shown, without_credentials
from sparkdl.volumes.grid import Bounds, Sizes

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
    with required("the driver and all executors read and write arrays by tensorstore", "volumes"):
        import tensorstore
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


LABELS = {"uint8": 2**8, "uint16": 2**16, "uint32": 2**32, "uint64": 2**64}
"""The dtypes of labels, with how many they tell apart."""
VALUES = ("float16", "bfloat16", "float32", "float64")
"""The dtypes of what a network returns."""

_SLOWEST_LAST = ("n5", "neuroglancer_precomputed")
_STORES = ("driver", "bucket", "endpoint", "base_url", "base")
"""What tells one store from another in tensorstore's specifications."""
_CHANNELS = ("c", "channel", "channels")
_SUFFIXES = {".zarr": "zarr3", ".n5": "n5"}
_COMPRESSED = [
    {"name": "bytes", "configuration": {"endian": "little"}},
    {"name": "zstd", "configuration": {"level": 1}},
]


class Volume:
    """An opened array.

    Args:
        opened: by tensorstore.
        axes: two or three, without channels.

    Attributes:
        driver: tensorstore's name of the format.
        shape: without channels.
        channels: None if it has no such axis.
        dtype: numpy's.
        opened_array: as given.
    """

    def __init__(self, opened: Any, axes: int) -> None:
        self.opened_array = opened
        self.driver: str = opened.spec().to_json()["driver"]
        view = opened.T if self.driver in _SLOWEST_LAST else opened
        labels = [str(label).lower() for label in view.domain.labels]
        if view.rank not in (axes, axes + 1):
            raise ConfigError(
                f"{self.url} has {view.rank} axes, {tuple(view.shape)}: with patch sizes for "
                f"{axes} axes it must have those, or one more before them for channels. Give as "
                "many sizes as there are axes, or a part of the array by tensorstore's JSON "
                "specification with a 'transform'"
            )
        named = [label for label in labels if label in _CHANNELS]
        if view.rank == axes + 1 and named and labels[0] != named[0]:
            view = view[tensorstore().d[labels.index(named[0])].transpose[0]]
        self._view = view[tensorstore().d[:].translate_to[0]]
        self.channels = self._view.shape[0] if view.rank == axes + 1 else None
        self.shape: Sizes = tuple(self._view.shape[view.rank - axes :])
        self.dtype: np.dtype[Any] = np.dtype(self._view.dtype.numpy_dtype)
        if 0 in self._view.shape:
            raise ConfigError(f"{self.url} is empty: its shape is {tuple(self._view.shape)}")

    @classmethod
    def opened(cls, place: Place, axes: int, **options: Any) -> Volume:
        """Open or create an array.

        Args:
            place: where it is.
            axes: without channels.
            options: of ``tensorstore.open``.

        Raises:
            ConfigError: it has another number of axes.
            DataError: it cannot be opened or created.
        """
        spec, library = specification(place), tensorstore()
        with said("created" if options.get("create") else "opened", place):
            opened = answered(library.open(spec, **options))
            return cls(opened, axes)

    @property
    def url(self) -> str:
        """Where it is, for messages and to compare."""
        store = self.opened_array.kvstore
        try:
            return without_credentials(str(store.url))
        except NotImplementedError:  # a store that no URL names, such as S3 at an endpoint
            return shown(store.spec().to_json())

    @property
    def specification(self) -> dict[str, Any]:
        """What other processes open."""
        spec = self.opened_array.spec(retain_context=True, minimal_spec=True)
        found: dict[str, Any] = spec.to_json()
        return found

    @property
    def identity(self) -> str:
        """Which part of which array it is, the same in every process."""
        spec = self.opened_array.spec(minimal_spec=True).to_json()
        part = {name: spec[name] for name in sorted(spec) if name not in ("kvstore", "context")}
        return f"{self.url} {json.dumps(part)}"

    @property
    def location(self) -> tuple[dict[str, Any], str]:
        """The store that it is in, and its path there, which ends in "/" unless it is empty."""
        store = self.opened_array.kvstore.spec().to_json()
        path = store.get("path", "")
        if store["driver"] == "file":
            path = os.path.join(os.path.realpath(path), "")
        return {name: store[name] for name in _STORES if name in store}, path

    @property
    def files(self) -> str | None:
        """A digest of the files that it is in: their names, sizes and times.

        None if it is in no local files, or a link among them leads elsewhere.
        """
        store, path = self.location
        if store["driver"] != "file":
            return None
        with said("read", self.url):
            return _digest_of(path)

    @property
    def holds_nothing(self) -> bool:
        """Whether not a single block is stored; false where that cannot be known."""
        if self.driver == "neuroglancer_precomputed":  # tensorstore 0.1.86 looks for other names
            return False
        with said("read", self.url):
            found = answered(self.opened_array.storage_statistics(query_not_stored=True), DATA_S)
        return bool(found.not_stored)

    @property
    def blocks(self) -> Sizes:
        """The sizes that are written as one object, without channels."""
        layout, axes = self._view.chunk_layout, len(self.shape)
        if any(layout.grid_origin):
            raise ConfigError(
                f"the blocks of {self.url} do not begin at its corner: leave out the 'transform' "
                "of the output's specification"
            )
        return tuple(layout.write_chunk.shape[-axes:])

    def read(self, bounds: Bounds, dtype: torch.dtype) -> np.ndarray:
        """Read, shape (channels, *sizes).

        Raises:
            DataError: it cannot be read, or holds a number that the dtype cannot hold.
        """
        with said("read", self.url):
            values: np.ndarray = answered(self._part(bounds).read(), DATA_S)
        values = values if self.channels else values[None]
        remedy = "Scale the array first, or make the model with an example of a wider dtype"
        _require_held(values, dtype, bounds, self.url, remedy)
        return values

    def write(self, bounds: Bounds, values: Tensor) -> None:
        """Write, shape (channels, *sizes); the values are durable when it returns.

        Raises:
            DataError: it cannot be written, or its dtype cannot hold a value.
        """
        computed = values.numpy()
        _require_held(
            computed,
            getattr(torch, self.dtype.name),
            bounds,
            f"what is to be written to {self.url}",
            "Choose a wider dtype in the output's specification, or have the model scale it",
        )
        array = (computed if self.channels else computed[0]).astype(self.dtype, copy=False)
        with said("written", self.url):
            # Not by reference: tensorstore 0.1.86 then takes some blocks for ones of fill values.
            answered(self._part(bounds).write(array), DATA_S)

    def _part(self, bounds: Bounds) -> Any:
        place = tuple(slice(*each) for each in bounds)
        part = self._view[(slice(None), *place) if self.channels else place]
        return part[tensorstore().d[:].translate_to[0]]


def _require_held(
    values: np.ndarray, dtype: torch.dtype, bounds: Bounds, whose: str, remedy: str
) -> None:
    """Check that a dtype holds all numbers of a part of an array.

    Args:
        values: shape (channels, *sizes).
        dtype: what they are to become.
        bounds: where the part is.
        whose: what holds them, as the beginning of a sentence.
        remedy: what to do about it.

    Raises:
        DataError: it does not; the message names the first number and its place.
    """
    lost = first_lost(values, dtype)
    if lost is None:
        return
    channel, *inside = (int(each) for each in np.unravel_index(lost, values.shape))
    voxel = tuple(low + each for (low, _), each in zip(bounds, inside, strict=True))
    name = str(dtype).removeprefix("torch.")
    raise DataError(
        f"{whose} holds {values.flat[lost]} ({values.dtype}) in voxel {voxel} of channel "
        f"{channel}, which {name} cannot hold. {remedy}"
    )


def _digest_of(path: str) -> str | None:
    """A digest of the files in a folder; None if there is a link among them."""
    digest = hashlib.sha256()
    with os.scandir(path) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        told: object
        if entry.is_symlink():
            return None
        if entry.is_dir():
            told = _digest_of(entry.path)
            if told is None:
                return None
        else:
            status = entry.stat()
            told = (status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
        digest.update(repr((entry.name, told)).encode())
    return digest.hexdigest()


def created(
    place: Place,
    source: Volume,
    outputs: int,
    *,
    labels: bool,
    blocks: Sizes,
    trial: bool = False,
) -> Volume:
    """Open an output, or create it if it is not there.

    A path that ends in ``.zarr`` or ``.n5`` becomes such an array, if the input is none of another
    version; else it is of the input's format. What a specification says is kept to.

    Args:
        place: where it is to be.
        source: what it is made of.
        outputs: channels of the network's output.
        labels: whether it holds the index of the largest channel instead.
        blocks: the sizes of its blocks, unless the specification has others.
        trial: to find out whether it can be, and what its blocks are; nothing is written.

    Raises:
        ConfigError: it cannot hold that.
        DataError: it cannot be written.
    """
    spec, library = specification(place), tensorstore()
    if spec["driver"] == "auto":
        spec = {**spec, "driver": _format(place, source.driver)}
        if spec["driver"] == "zarr3":
            spec["metadata"] = {"codecs": _COMPRESSED}
    turned, axes = spec["driver"] in _SLOWEST_LAST, len(source.shape)
    dtype = spec.setdefault("dtype", _smallest(outputs) if labels else "float32")
    if dtype not in (LABELS if labels else VALUES) or outputs > LABELS.get(dtype, outputs):
        wanted = f"labels below {outputs}" if labels else "what the network returns"
        raise ConfigError(
            f"an array of {dtype} cannot hold {wanted}: choose one of "
            f"{', '.join(LABELS if labels else VALUES)}"
        )
    precomputed = spec["driver"] == "neuroglancer_precomputed"
    if precomputed and axes != 3:
        raise ConfigError(
            "Neuroglancer's precomputed volumes have three axes, and patch has "
            f"{axes} sizes: choose another format, or take the input as a volume one voxel deep"
        )
    channels = [1 if labels else outputs] if precomputed or not labels else []
    shape = [*channels, *source.shape]
    grid = [*([0 if precomputed else 1] if channels else []), *blocks]
    lower, units = [0] * len(shape), None
    if precomputed and source.driver == spec["driver"]:
        opened = source.opened_array
        lower, units = [0, *opened.domain.inclusive_min[2::-1]], opened.dimension_units
    upper = [low + size for low, size in zip(lower, shape, strict=True)]
    turn = -1 if turned else 1
    options = {
        "domain": library.IndexDomain(inclusive_min=lower[::turn], exclusive_max=upper[::turn]),
        "chunk_layout": library.ChunkLayout(chunk_shape_soft_constraint=grid[::turn]),
        **({"dimension_units": units} if units is not None else {}),
        **({"fill_value": 0} if spec["driver"] in ("zarr", "zarr3") else {}),
    }
    if trial:
        options["transaction"] = library.Transaction()  # which is never committed
    return Volume.opened(spec, axes, create=True, open=True, **options)


def require_apart(source: Volume, target: Volume) -> None:
    """Check that an output is apart from its input.

    Raises:
        ConfigError: one is in the folder of the other, or is the other.
    """
    (store, path), (other, place) = source.location, target.location
    if store == other and (path.startswith(place) or place.startswith(path)):
        raise ConfigError(
            f"the output, {target.url}, and the input, {source.url}, are one array, or one is in "
            "the folder of the other, where whoever deletes that deletes both. Choose another "
            "place for the output"
        )


def _format(place: Place, of_source: str) -> str:
    suffix = "" if isinstance(place, Mapping) else os.path.splitext(os.fspath(place).rstrip("/"))[1]
    if suffix not in _SUFFIXES or of_source.startswith(suffix[1:]):
        return of_source
    return _SUFFIXES[suffix]


def _smallest(labels: int) -> str:
    return next(dtype for dtype, most in LABELS.items() if labels <= most)
