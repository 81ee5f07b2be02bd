"""A link: how fast a host sends and receives, as users write it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from sparkdl.errors import ConfigError

FORM = "write a link as '1 Gbit/s', '125 MB/s' or '100 Mbit/s, 1 ms', or as bytes a second"
_PREFIX = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_BITS = {"bit/s": 1 / 8, "bits/s": 1 / 8, "b/s": 1 / 8, "bps": 1 / 8}
_UNIT = _BITS | {"B/s": 1.0, "byte/s": 1.0, "bytes/s": 1.0}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6}
_NUMBER = r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)"
_SPEED = re.compile(
    rf"{_NUMBER}\s*({'|'.join(filter(None, [*_BINARY, *_PREFIX]))}|)({'|'.join(_UNIT)})"
)
_LATENCY = re.compile(rf"{_NUMBER}\s*({'|'.join(_SECONDS)})")


@dataclass(frozen=True, slots=True)
class Link:
    """What connects a host with the others.

    Args:
        bandwidth: bytes a second, in each direction at the same time.
        latency: seconds that a message takes beside its bytes.

    Raises:
        ConfigError: no bytes a second, or less than no latency.
    """

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bandwidth) and self.bandwidth > 0):
            raise ConfigError(
                f"a link of {self.bandwidth:g} bytes a second carries nothing that can be planned "
                f"with: {FORM}"
            )
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise ConfigError(f"a link's latency is {self.latency:g} s: it must be 0 or more")

    @classmethod
    def parse(cls, link: str | float | Link) -> Link:
        """The link that is meant.

        Args:
            link: such as ``"1 Gbit/s"`` or ``"100 Mbit/s, 1 ms"`` (a small b is a bit, a large one
                a byte), bytes a second, or a Link.

        Raises:
            ConfigError: it cannot be read, or carries nothing.
        """
        if isinstance(link, Link):
            return link
        if isinstance(link, str):
            speed, comma, latency = link.strip().partition(",")
            fast = _SPEED.fullmatch(speed.strip())
            late = _LATENCY.fullmatch(latency.strip())
            if fast is None or (comma and late is None):
                raise ConfigError(f"link={link!r} cannot be read: {FORM}")
            number, prefix, unit = fast.groups()
            bandwidth = float(number) * (_PREFIX | _BINARY)[prefix] * _UNIT[unit]
            return cls(bandwidth, float(late[1]) * _SECONDS[late[2]] if late else 0.0)
        try:
            if isinstance(link, bool):
                raise TypeError
            return cls(float(link))
        except (TypeError, OverflowError) as error:
            raise ConfigError(f"link={link!r} is no link: {FORM}") from error

    def __str__(self) -> str:
        bits = 8 * self.bandwidth
        size, prefix = next(
            (each for each in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if bits >= each[0]), (1.0, "")
        )
        late = f", {self.latency * 1e3:.3g} ms" if self.latency else ""
        return f"{bits / size:.4g} {prefix}bit/s{late}"
