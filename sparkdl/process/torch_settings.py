"""torch's process-wide settings that affect results: the driver's apply on the workers too."""

from __future__ import annotations

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
    def hold(self) -> Iterator[None]:
        """Compute with these settings, and with gradients, within the context."""
        before = TorchSettings.here()
        self._set()
        try:
            with torch.inference_mode(False), torch.enable_grad():
                yield
        finally:
            before._set()

    def _set(self) -> None:
        if self == TorchSettings.here():
            return
        torch.set_default_dtype(self.default_dtype)
        torch.set_deterministic_debug_mode(self.deterministic_mode)
        torch.set_float32_matmul_precision(self.matmul_precision)
