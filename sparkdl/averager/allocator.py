"""Keep freed memory for the next message.

gRPC allocates what it receives anew for each message. By glibc's own thresholds most of that goes
back to the kernel when it is freed, and each page is cleared and mapped again when it is next
touched: a third of the time of a large round.
"""

from __future__ import annotations

import ctypes
import functools

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 256 << 20
"""The most memory that stays with the process after it was freed; messages in flight fit in it."""
MAPPED_BYTES = 32 << 20
"""Larger allocations go back at once. glibc raises its threshold to this by itself, but only after
such an allocation has been freed once, and not any more once the other threshold is set."""


@functools.cache
def keep_freed_memory() -> None:
    """Set the thresholds of this process; without glibc, nothing happens."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
