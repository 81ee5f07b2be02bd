"""A link: how fast a host sends and receives, as users write it.

How many workers are worth adding, and which period a link asks for: closed forms.

Zou et al. 2017, "Distributed Training Large-Scale Deep Architectures" (arXiv 1709.06622), has both
lemmas. Its full text could not be read, only its abstract: the algebra is derived anew from what
the abstract and others say of it.

With T_C what more workers divide and T_O what they do not, in the time of one worker::

    speed-up(G) = (T_C + T_O) / (T_C / G + T_O)           R = T_O / T_C
    efficiency  = speed-up / G = (1 + R) / (1 + G R)      speed-up < (1 + R) / R

An epoch of averaging in the driver has that form: for one worker it is C seconds of computing and
r rounds, each of a seconds and c more for every worker's bytes. With G workers there are r / G of
them, so that it takes (C + r a) / G + r c: T_C = C + r a, and T_O = r c.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from sparkdl.arguments import as_number
from sparkdl.errors import ConfigError

ROUNDING = 1e-9
"""What floating point may be short of a whole number of workers."""


def most_workers(overhead: float, least_efficiency: float) -> float:
    """The most workers that are at least so efficient (lemma 1, solved for G).

    Args:
        overhead: R = T_O / T_C, >= 0.
        least_efficiency: alpha, in (0, 1].

    Returns:
        floor(((1 + R) / alpha - 1) / R), a whole number; infinity where nothing limits them.

    Raises:
        ConfigError: no efficiency, or a negative overhead.
    """
    alpha = require_efficiency(least_efficiency)
    if not overhead >= 0:
        raise ConfigError(f"an overhead cannot be {overhead:g}")
    if overhead == 0:
        return math.inf
    return math.floor(((1 + overhead) / alpha - 1) / overhead + ROUNDING)


def least_period(sent: float, workers: int, bandwidth: float, step_s: float) -> int:
    """The shortest period at which one server's link carries a round while the workers compute.

    Lemma 2 says how many servers carry a round of N workers, who all send and receive S bytes, in
    the time T in which they compute: 2 S N / (B T). There is one here, the driver, and T is as many
    steps as the period has. From this period on the driver keeps up with workers that do not wait
    for it, and those that do wait for at most as long as they compute.

    Args:
        sent: bytes of the parameters, S.
        workers: N.
        bandwidth: of the driver's link, bytes a second.
        step_s: seconds of a step.

    Raises:
        ConfigError: no bandwidth, or no time.
    """
    if not (bandwidth > 0 and step_s > 0):
        raise ConfigError(f"nothing fits into {step_s:g} s at {bandwidth:g} bytes a second")
    return max(1, math.ceil(2 * sent * workers / (bandwidth * step_s) - ROUNDING))


def require_efficiency(alpha: float) -> float:
    """Check that it is one.

    Raises:
        ConfigError: it is not in (0, 1].
    """
    number = as_number(alpha)
    if number is None or not 0 < number <= 1:
        raise ConfigError(f"efficiency must be a number > 0 and <= 1, such as 0.8, got {alpha!r}")
    return number


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
