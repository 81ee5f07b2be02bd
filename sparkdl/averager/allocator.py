"""Keep freed memory for the next message.

gRPC allocates what it receives anew for each message. By glibc's own thresholds most of that goes
back to the kernel when it is freed, and each page is cleared and mapped again when it is next
touched: a quarter of the time of a large round.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
MAPPED_BYTES = 32 << 20
"""Larger allocations go back at once. glibc raises its threshold to this by itself, but not any
more once the other threshold is set."""


def keep_freed_memory(kept_bytes: int) -> None:
    """Set the thresholds of this process; without glibc, nothing happens.

    Args:
        kept_bytes: the most that a heap keeps of what was freed at its end.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, kept_bytes)
