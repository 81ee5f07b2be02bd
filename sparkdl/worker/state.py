"""What only one worker knows, as tensors and JSON; with the center it restores the worker.

The center holds what the replicas agree on. In addition a replica has random number generators, the
optimizer's hyperparameters, the position of the schedule that has set them, the part of the
optimizer's state that is not floating-point, real or complex (all of that state if the strategy
does not exchange it), and what the strategy itself remembers.
"""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparkdl.checkpoint.tensor_file import read_tensors, write_tensors
from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.process.randomness import random_state, set_random_state
from sparkdl.strategies.base import Run, Strategy

logger = logging.getLogger(__name__)

_MISFITS = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError)
"""What torch, numpy and Python raise for a state that is not their own."""
_STATE = re.compile(r"state\.(\d+)\.(.*)", re.DOTALL)
_STRATEGY = "strategy."
_GROUP = re.compile(r"group\.(\d+)\.(.*)", re.DOTALL)


def pack_worker_state(
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
    *,
    center_has_optimizer: bool,
    schedule_steps: int = 0,
    of_strategy: Mapping[str, Any] | None = None,
    left_out: str = "",
) -> bytes:
    """Take one worker's state.

    Args:
        optimizer: the replica's optimizer; None for the random numbers alone.
        device: the replica's device, whose random number generator is also saved.
        center_has_optimizer: whether the center holds the optimizer's floating-point state.
        schedule_steps: how many steps the learning rate schedule has taken.
        of_strategy: what the strategy remembers on this worker, by name.
        left_out: why the optimizer is left out, for a warning where the state is restored; empty if
            nothing is missed.

    Returns:
        A safetensors file.

    Raises:
        CheckpointError: the optimizer or the strategy keeps something that cannot be saved without
            pickle.
    """
    values = {f"{_STRATEGY}{name}": value for name, value in (of_strategy or {}).items()}
    _require_plain(values, "the strategy")
    if optimizer is not None:
        values |= _optimizer_values(optimizer, with_floats=not center_has_optimizer)
        _require_plain(values, type(optimizer).__name__)
    tensors = _tensors(values)
    description = {
        "values": {name: value for name, value in values.items() if name not in tensors},
        # Optimizers keep their step counters on the CPU whatever the device.
        "on_device": [name for name, value in tensors.items() if value.device.type != "cpu"],
        "schedule_steps": schedule_steps,
        "left_out": left_out,
    }
    tensors |= random_state(device)
    file = io.BytesIO()
    write_tensors(file, tensors, {"own": json.dumps(description)})
    return file.getvalue()


def _tensors(values: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _require_plain(values: Mapping[str, Any], whose: str) -> None:
    others = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
    try:
        json.dumps(others)
        _require_names(others)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{whose} keeps state that cannot be saved without pickle: {error}. Leave out "
            "checkpointPath, or have it keep only tensors, numbers and strings"
        ) from error


def _require_names(value: Any) -> None:
    """Check that the keys of dicts are strings; JSON makes strings of others, without a word.

    Raises:
        TypeError: some are not.
    """
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"a dict has the key {key!r}, which is no string")
        value = value.values()
    elif not isinstance(value, list | tuple):
        return
    for each in value:
        _require_names(each)


def unpack_worker_state(
    octets: bytes,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    set_schedule: Callable[[int], None] = lambda steps: None,
) -> dict[str, Any]:
    """Restore on a worker what ``pack_worker_state`` took.

    Args:
        octets: what ``pack_worker_state`` returned.
        optimizer: the replica's optimizer; its state and hyperparameters are overwritten.
        device: the replica's.
        set_schedule: takes the schedule to its position, before the hyperparameters are restored.

    Returns:
        What the strategy remembered, by name.

    Raises:
        CheckpointError: the state is damaged, or belongs to another optimizer.
    """
    tensors, metadata = read_tensors(io.BytesIO(octets))
    try:
        description = json.loads(metadata["own"])
        on_device = set(description["on_device"])
        set_schedule(description["schedule_steps"])
        moved = {
            name: tensor.to(device) if name in on_device else tensor
            for name, tensor in tensors.items()
        }
        of_strategy = {}
        for name, value in (moved | description["values"]).items():
            if name.startswith(_STRATEGY):
                of_strategy[name.removeprefix(_STRATEGY)] = value
            else:
                _put(optimizer, name, value)
        set_random_state(tensors, device)
        if left_out := description.get("left_out"):
            logger.warning(
                "what is not averaged of the state of %s starts over in the middle of the "
                "training, as it could not be kept without pickle: %s. Have it keep only tensors, "
                "numbers and strings",
                type(optimizer).__name__,
                left_out,
            )
        return of_strategy
    except _MISFITS as error:
        raise CheckpointError(f"a worker's saved state does not fit it: {error!r}") from error


def _optimizer_values(optimizer: torch.optim.Optimizer, *, with_floats: bool) -> dict[str, Any]:
    """Hyperparameters and state by name; parameters are numbered across all groups."""
    values: dict[str, Any] = {}
    parameters: list[Tensor] = []
    for index, group in enumerate(optimizer.param_groups):
        parameters += group["params"]
        values |= {f"group.{index}.{key}": group[key] for key in group if key != "params"}
    for number, parameter in enumerate(parameters):
        for key, value in optimizer.state.get(parameter, {}).items():
            is_float = isinstance(value, Tensor) and (
                value.is_floating_point() or value.is_complex()
            )
            if with_floats or not is_float:
                values[f"state.{number}.{key}"] = value
    return values


def _put(optimizer: torch.optim.Optimizer, name: str, value: Any) -> None:
    if match := _GROUP.fullmatch(name):
        group = optimizer.param_groups[int(match[1])]
        # JSON turned the optimizer's tuples into lists.
        group[match[2]] = tuple(value) if isinstance(group[match[2]], tuple) else value
    elif match := _STATE.fullmatch(name):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.state[parameters[int(match[1])]][match[2]] = value


def checkpointed_state(run: Run, strategy: Strategy[Any]) -> bytes:
    """The part of a worker's state outside the center, for a checkpoint.

    Args:
        run: the worker's.
        strategy: the one by which it trains.
    """
    in_center = strategy.needs.exchanges_optimizer_state
    return _packer(run, strategy)(run.replica.optimizer, center_has_optimizer=in_center)


def restart_state(run: Run, strategy: Strategy[Any], *, passed_on: bool = False) -> bytes:
    """What the driver keeps of a worker, to restart all of them from a commit.

    That is the random numbers, the strategy's state, and the part of the optimizer that the center
    does not hold. State that replicas do not exchange is left out, as the driver's memory must not
    grow with the number of workers.

    Args:
        run: the worker's.
        strategy: the one by which it trains.
        passed_on: whether other workers go on with it, as ``max_workers`` has it.

    Raises:
        ConfigError: the optimizer's state cannot be passed on.
    """
    pack = partial(_packer(run, strategy), center_has_optimizer=True)
    optimizer = run.replica.optimizer if strategy.needs.exchanges_optimizer_state else None
    try:
        return pack(optimizer)
    except CheckpointError as error:
        if passed_on:
            raise ConfigError(
                "with maxWorkers, added workers go on with the state of the others' optimizers, "
                f"but {type(optimizer).__name__} keeps some that cannot be sent without pickle: "
                f"{error.__cause__}. Set numWorkers alone, or have it keep only tensors, numbers "
                "and strings"
            ) from error
        # The state of a user's optimizer, which nobody asked to save.
        return pack(None, left_out="" if optimizer is None else str(error.__cause__))


def _packer(run: Run, strategy: Strategy[Any]) -> Callable[..., bytes]:
    return partial(
        pack_worker_state,
        device=run.replica.device,
        schedule_steps=run.replica.schedule.steps,
        of_strategy={} if run.state is None else strategy.saved_state(run.state),
    )
