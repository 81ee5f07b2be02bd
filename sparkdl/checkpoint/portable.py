"""A module as a pickle for other processes: of the module itself, or of its builder and its state.

Modules with parametrizations (weight_norm, spectral_norm, orthogonal) and TorchScript modules
refuse to be pickled. Their builder rebuilds them, and then their values are put in.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from sparkdl.errors import ModelError
from sparkdl.process.randomness import borrowed_random_numbers
from sparkdl.user_code.needed_modules import ReferencePickler
from sparkdl.user_code.tracebacks import message_of


def pickled_module(
    module: nn.Module,
    builder: Any,
    pickler: Callable[[io.BytesIO], cloudpickle.Pickler] = cloudpickle.Pickler,
    *,
    seed: int | None = None,
) -> bytes:
    """Pickle a module such that unpickling restores it.

    Args:
        module: the module in its present state.
        builder: the function that built it, or the module that it is a trained copy of.
        pickler: what pickles it into a file.
        seed: of the random numbers that the function drew; None if unknown.

    Raises:
        ModelError: neither can be pickled.
    """
    file = io.BytesIO()
    _dump(module, partial(built, builder, seed), pickler, file)
    return file.getvalue()


def require_portable(module: nn.Module, builder: Any) -> None:
    """Check that ``pickled_module`` will work, without the time and memory for the values.

    Raises:
        ModelError: neither can be pickled.
    """
    _dump(
        module,
        partial(built, builder, None),
        lambda file: _WithoutValues(file, set()),
        io.BytesIO(),
    )


class _WithoutValues(ReferencePickler):
    """Leaves out tensors."""

    def persistent_id(self, value: Any) -> str | None:
        return "tensor" if isinstance(value, Tensor) else None


def _dump(
    module: nn.Module,
    build: Callable[[], nn.Module],
    pickler: Callable[[io.BytesIO], cloudpickle.Pickler],
    file: io.BytesIO,
) -> None:
    try:
        pickler(file).dump(module)
    except Exception as error:  # any __reduce__ may raise anything
        file.seek(0)
        file.truncate()
        try:
            pickler(file).dump(_Built(module, build))
        except Exception:
            raise ModelError(
                "once built, the model cannot be sent to the executors, which transform requires: "
                f"{message_of(error)}. Leave out what cannot be pickled with "
                "__getstate__, or create it on first use; of parametrizations, keep the values: "
                "torch.nn.utils.parametrize.remove_parametrizations"
            ) from error


class _Built:
    """Unpickles as the module itself."""

    def __init__(self, module: nn.Module, build: Callable[[], nn.Module]) -> None:
        self._parts = build, module.state_dict(), other_buffers(module)

    def __reduce__(self) -> tuple[Any, ...]:
        return _build_again, self._parts


def built(builder: Any, seed: int | None) -> Any:
    """What a builder returns, or the module that is given instead.

    Args:
        builder: the function, or the module.
        seed: of the random numbers that it drew, of which it may keep some elsewhere than in its
            state; None if unknown.
    """
    with borrowed_random_numbers(seed):
        return builder if isinstance(builder, nn.Module) else builder()


def _build_again(
    build: Callable[[], nn.Module], state: dict[str, Any], others: dict[str, Tensor]
) -> nn.Module:
    module = build()
    put_state(module, state)
    for name, values in others.items():
        path, _, own_name = name.rpartition(".")
        owner = module.get_submodule(path)
        # Not replaced: it may have several names.
        if (built := getattr(owner, own_name, None)) is not None:
            built.data = values
        else:
            setattr(owner, own_name, values)
    return module


def other_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that are no part of a module's state, by name."""
    state = module.state_dict()
    return {name: each for name, each in module.named_buffers() if name not in state}


def put_state(module: nn.Module, state: dict[str, Any]) -> None:
    """Put a state into a module that was built again, in the dtypes that its values have.

    Its tensors stay the same objects, unlike with ``assign=True``: they may have several names, and
    the module may hold them elsewhere too. Buffers that are no part of the state stay as they are.

    Raises:
        RuntimeError: the state is another architecture's.
    """
    for name, own in module.state_dict(keep_vars=True).items():
        values = state.get(name)
        if isinstance(own, Tensor) and isinstance(values, Tensor) and own.dtype != values.dtype:
            own.data = torch.empty_like(own.data, dtype=values.dtype)
    module.load_state_dict(state)
