"""The arguments of ``TorchModel.transform_volume``, which says what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparkdl.arguments import as_list, require_whole
from sparkdl.errors import ConfigError
from sparkdl.volumes.grid import Sizes


@dataclass(frozen=True)
class VolumeOptions:
    """Checked arguments.

    Attributes:
        patch: as there, like all others.
        overlap: of patches.
        crop: None for what the network leaves out.
        chunk: None for "auto".
        labels: whether ``reduce`` is "argmax".
        skip_zeros: whether ``skip`` is "zeros".
    """

    patch: Sizes
    overlap: Sizes
    crop: Sizes | None
    chunk: Sizes | None
    labels: bool
    skip_zeros: bool

    @classmethod
    def of(
        cls,
        patch: Sequence[int],
        overlap: Sequence[int],
        crop: Sequence[int] | None,
        chunk: str | Sequence[int],
        reduce: str | None,
        skip: str | None,
    ) -> VolumeOptions:
        """Check arguments as the user gave them.

        Raises:
            ConfigError: one is wrong.
        """
        axes = len(as_list(patch) or ())
        if axes not in (2, 3):
            raise ConfigError(
                f"patch must be two or three whole numbers, (y, x) or (z, y, x), got {patch!r}"
            )
        for name, given, known in (("reduce", reduce, "argmax"), ("skip", skip, "zeros")):
            if given not in (None, known):
                raise ConfigError(f"{name} must be {known!r} or None, got {given!r}")
        return cls(
            _sizes("patch", patch, axes, 1),
            _sizes("overlap", overlap, axes, 0),
            None if crop is None else _sizes("crop", crop, axes, 0),
            None if isinstance(chunk, str) and chunk == "auto" else _sizes("chunk", chunk, axes, 1),
            reduce is not None,
            skip is not None,
        )


def _sizes(name: str, given: Any, axes: int, least: int) -> Sizes:
    found = as_list(given)
    if found is None or len(found) != axes:
        other = "'auto' or " if name == "chunk" else ""
        raise ConfigError(
            f"{name} must be {other}{axes} whole numbers, one for each axis of patch, got {given!r}"
        )
    return tuple(require_whole(name, each, least) for each in found)
