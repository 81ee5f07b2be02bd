"""torch's settings of a whole process on which results depend: the driver's hold on the workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TorchSettings:
    """What torch computes with in a process; a task that runs user code may leave others behind.

    Attributes:
        default_dtype: of tensors and parameters that are made of Python's fractions.
        deterministic_mode: whether operations that give other bits each time are errors.
        matmul_precision: of products of float32 matrices.
    """

    default_dtype: torch.dtype
    deterministic_mode: int
    matmul_precision: str

    @classmethod
    def here(cls) -> TorchSettings:
        """Those of this process."""
        return cls(
            torch.get_default_dtype(),
            torch.get_deterministic_debug_mode(),
            torch.get_float32_matmul_precision(),
        )

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Compute with these for a while, and with gradients."""
        before = TorchSettings.here()
        self._set()
        try:
            with torch.enable_grad():
                yield
        finally:
            before._set()

    def _set(self) -> None:
        if self == TorchSettings.here():
            return
        torch.set_default_dtype(self.default_dtype)
        torch.set_deterministic_debug_mode(self.deterministic_mode)
        torch.set_float32_matmul_precision(self.matmul_precision)
