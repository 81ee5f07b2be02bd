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
