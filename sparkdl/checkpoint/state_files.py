"""Checkpoints of a user's own training loop: a dict of state dicts, numbers and tensors.

Each holds a file of ``torch.save`` that ``torch.load(weights_only=True)`` reads: it has no code.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from sparkdl.checkpoint.container import Piece
from sparkdl.checkpoint.storage import CheckpointStore, OpenElsewhere
from sparkdl.errors import CheckpointError, ConfigError

STATE = "state"
_KIND = {"kind": "state of a training function"}


def save_state(store: CheckpointStore, state: Mapping[str, Any]) -> None:
    """Publish a checkpoint, all of it or nothing.

    Args:
        store: where.
        state: values by name: modules, optimizers and anything else with a ``state_dict``, tensors,
            numbers, strings, and lists and dicts of these.

    Raises:
        ConfigError: a value could only be read back by running code that the file names, or is a
            part of a tensor.
        CheckpointError: the file system refuses.
    """
    states = {name: _state_of(value) for name, value in state.items()}
    _require_whole(states)
    octets = io.BytesIO()
    torch.save(states, octets)
    octets.seek(0)
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(octets)
    if unsafe:
        raise ConfigError(
            f"a checkpoint cannot hold {', '.join(sorted(unsafe))}: reading it back would run "
            "code. Pass its state_dict(), or plain numbers and tensors"
        )
    size = len(octets.getbuffer())
    store.write({STATE: Piece("U8", [size], lambda _: iter([octets.getbuffer()]))}, _KIND)
    store.prune()


def load_state(path: str, *, open_elsewhere: OpenElsewhere | None = None) -> dict[str, Any] | None:
    """The newest state that ``save_state`` wrote there, with its tensors on the CPU.

    Args:
        path: the directory that was given to ``save_state``.
        open_elsewhere: tried for a URI whose file system pyarrow cannot open.

    Returns:
        What was saved, with modules and optimizers as their ``state_dict``; None if there is
        nothing.

    Raises:
        ConfigError: the directory cannot be used, or holds checkpoints of another kind.
        CheckpointError: the newest checkpoint cannot be read.
    """
    saved = CheckpointStore(path, keep_last=1, open_elsewhere=open_elsewhere).newest()
    if saved is None:
        return None
    if (piece := saved.contents.get(STATE)) is None:
        raise ConfigError(
            f"{saved.path} is not a checkpoint of a training function: it describes itself "
            f"as {saved.description}"
        )
    octets = io.BytesIO(b"".join(piece.blocks(piece.size)))
    try:
        state = torch.load(octets, map_location="cpu", weights_only=True)
    except Exception as error:  # other files may cause errors of any kind
        raise CheckpointError(f"{saved.path} cannot be read: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{saved.path} holds {type(state)}, not a dict by name")
    return state


def _state_of(value: Any) -> Any:
    if isinstance(value, DistributedDataParallel):
        value = value.module  # so that the names are those of the user's own module
    return value.state_dict() if hasattr(value, "state_dict") else value


def _require_whole(states: Mapping[str, Any]) -> None:
    for name, state in states.items():
        # DTensor's class would have to be imported to ask for it.
        if any(hasattr(each, "full_tensor") for each in tree_leaves(state)):
            raise ConfigError(
                f"'{name}' holds DTensors, of which this worker has a part. Save the whole state: "
                "get_model_state_dict and get_optimizer_state_dict of "
                "torch.distributed.checkpoint.state_dict with "
                "StateDictOptions(full_state_dict=True, cpu_offload=True)"
            )
