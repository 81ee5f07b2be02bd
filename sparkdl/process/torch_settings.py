"""torch's process-wide settings that affect results: the driver's apply on the workers too.

How the C library keeps memory that was freed, if it is glibc.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TorchSettings:
    """The settings torch computes with; a task that runs user code may leave others behind.

    Attributes:
        default_dtype: the dtype of tensors and parameters made from Python floats.
        deterministic_mode: whether nondeterministic operations are errors.
        matmul_precision: the precision of float32 matrix products.
    """

    default_dtype: torch.dtype
    deterministic_mode: int
    matmul_precision: str

    @classmethod
    def here(cls) -> TorchSettings:
        """The settings of this process."""
        return cls(
            torch.get_default_dtype(),
            torch.get_deterministic_debug_mode(),
            torch.get_float32_matmul_precision(),
        )

    @contextmanager
    def hold(self, threads: int | None = None) -> Iterator[None]:
        """Compute with these settings, and with gradients, within the context.

        Afterwards the process has its own again, and its threads and its default device, whatever
        the user's code has set.

        Args:
            threads: torch's threads within the context; None for as many as there are.
        """
        before = TorchSettings.here()
        device, threads_before = torch.get_default_device(), torch.get_num_threads()
        self._set()
        torch.set_num_threads(threads or threads_before)
        try:
            with torch.inference_mode(False), torch.enable_grad():
                yield
        finally:
            before._set()
            torch.set_num_threads(threads_before)
            if torch.get_default_device() != device:
                torch.set_default_device(None if device.type == "cpu" else device)

    def _set(self) -> None:
        if self == TorchSettings.here():
            return
        torch.set_default_dtype(self.default_dtype)
        torch.set_deterministic_debug_mode(self.deterministic_mode)
        torch.set_float32_matmul_precision(self.matmul_precision)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
KEPT_BYTES = 64 << 20
"""The most memory that stays with the process after it was freed."""
MAPPED_BYTES = 32 << 20
"""Larger allocations go back at once; glibc takes no larger threshold."""
LARGE_BYTES = 1 << 20
"""The same where memory is scarce."""


@functools.cache
def keep_freed_memory() -> None:
    """Keep freed memory in the process.

    A minibatch is about a megabyte that is freed when the next one comes. glibc would give such
    memory back to the system each time, and the next minibatch would pay a page fault for every
    4 KiB of it: a fifth of a millisecond, measured as 2.5 % of a training step of 9 ms.
    """
    _set(_M_MMAP_THRESHOLD, MAPPED_BYTES)
    _set(_M_TRIM_THRESHOLD, KEPT_BYTES)


@functools.cache
def share_freed_memory() -> None:
    """Have threads that begin from now on free memory for each other.

    glibc otherwise gives each an arena of its own, and keeps up to 64 MiB that was freed in each:
    for the threads in which tensorstore decompresses and compresses blocks, 200 to 300 MiB.
    """
    _set(_M_ARENA_MAX, 1)


def give_back_freed_memory() -> None:
    """Give the system what was freed, though memory above it is in use."""
    _call("malloc_trim", 0)


@contextmanager
def large_blocks_given_back() -> Iterator[None]:
    """Let blocks of a megabyte and more leave the process when they are freed.

    glibc would cut them out of its heap, where they stay between others that live longer: with
    parameters that are gathered and freed module by module, as much as the whole model takes. Pages
    of their own cost some time in each allocation.
    """
    keep_freed_memory()  # who calls it later does not undo this
    _set(_M_MMAP_THRESHOLD, LARGE_BYTES)
    try:
        yield
    finally:
        _set(_M_MMAP_THRESHOLD, MAPPED_BYTES)


def _set(name: int, value: int) -> None:
    _call("mallopt", name, value)


def _call(function: str, *arguments: int) -> None:
    of_glibc = getattr(ctypes.CDLL(None), function, None)
    if of_glibc is not None:
        of_glibc(*arguments)
