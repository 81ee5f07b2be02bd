"""torch computes as the driver's does, and is afterwards as another program has left it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sparkdl.process.torch_settings import TorchSettings


def look() -> tuple[Any, ...]:
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        torch.is_grad_enabled(),
    )


@pytest.fixture
def left_by_another_program() -> Iterator[tuple[Any, ...]]:
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("medium")
    torch.set_grad_enabled(False)
    yield look()
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch.set_grad_enabled(True)


def test_gradients_are_there_within_the_callers_inference_mode() -> None:
    with torch.inference_mode(), TorchSettings.here().hold():
        assert not torch.zeros(1).is_inference()
        assert (torch.ones(1, requires_grad=True) * 2).requires_grad


def test_settings_hold_for_a_while_with_gradients_and_are_put_back(
    request: pytest.FixtureRequest,
) -> None:
    clean, here = look(), pickle.loads(pickle.dumps(TorchSettings.here()))
    left = request.getfixturevalue("left_by_another_program")
    assert all(mine != others for mine, others in zip(clean, left, strict=True))
    with here.hold():
        assert look() == clean
    assert look() == left
    with pytest.raises(ZeroDivisionError), here.hold():
        raise ZeroDivisionError
    assert look() == left


def test_threads_and_the_default_device_are_put_back_whoever_set_them() -> None:
    def seen() -> tuple[int, torch.device]:
        return torch.get_num_threads(), torch.get_default_device()

    before = seen()
    with TorchSettings.here().hold():
        assert seen() == before

    def change() -> None:
        with TorchSettings.here().hold(before[0] + 2):
            assert torch.get_num_threads() == before[0] + 2
            torch.set_num_threads(before[0] + 1)
            torch.set_default_device("meta")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        change()
    assert seen() == before
