"""The initial values of a model, the same for the same seed whatever else this process does.

All threads of a process draw from the same random number generators, and one of the user's may draw
from them, or seed them, while a model is being built. So a function that draws random numbers as it
builds a model runs in a separate process, where nothing else does. It is forked from a process that
has imported torch, which takes a second, and waits for the next model.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import BinaryIO

import cloudpickle
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sparkdl.errors import ModelError
from sparkdl.feed.columns.ragged import equal_rows
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.process.randomness import seed_worker
from sparkdl.process.torch_settings import TorchSettings
from sparkdl.protocols import ModelBuilder
from sparkdl.replica import Replica, flatten, forward
from sparkdl.replica.frozen import frozen_values
from sparkdl.replica.warm_start import WithFrozenValues
from sparkdl.transport.framing import octets_of
from sparkdl.user_code.stand_ins import pickled_apart
from sparkdl.user_code.tracebacks import message_of

_START = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
from sparkdl.replica.initial import serve
serve(int(sys.argv[1]))
"""


@contextmanager
def drawn_apart(
    model: ModelBuilder, seed: int, deadline_s: float
) -> Iterator[Callable[[Replica], None]]:
    """Build a model in a separate process while the ``with`` block runs.

    Args:
        model: the builder; copying an instance needs no process, as it draws nothing.
        seed: seeds torch's, numpy's and Python's random numbers there.
        deadline_s: the longest that building may take, in seconds.

    Yields:
        A function that waits for the model, and overwrites the parameters and buffers of a replica
        built here with the model's, including those that are never trained.

    Raises:
        ModelError: the model cannot be built there, or has another layout there.
    """
    if not _draws(model):
        yield lambda replica: None
        return
    settings = TorchSettings.here()
    request = sys.path, os.getcwd(), dict(os.environ), settings, seed, _pickled(model)
    with ExitStack() as until_done:
        with _explained(deadline_s):
            connected = until_done.enter_context(_connect())
            connected.settimeout(deadline_s)
            with connected.makefile("wb") as file:
                pickle.dump(request, file)

        def overwrite(replica: Replica) -> None:
            with _explained(deadline_s), connected.makefile("rb") as file:
                _receive(file, replica)

        yield overwrite


def has_lazy_parameters(module: nn.Module) -> bool:
    """Whether a module needs its first batch to learn its parameters' shapes."""
    return any(map(is_lazy, [*module.parameters(), *module.buffers()]))


@dataclass(frozen=True)
class Initialized:
    """Builds a model with lazy layers, and shows it a batch of zeros.

    Attributes:
        model: the builder.
        schema: the batch's tensors, all of known shapes except for padded ones.
        features_as_kwargs: as for ``Replica``.
        items: number of items in each padded row.
    """

    model: ModelBuilder
    schema: FeedSchema
    features_as_kwargs: bool = False
    items: int = 1

    def __call__(self) -> nn.Module:
        """Build the model; the caller seeds the random numbers."""
        module = self.model()
        rows = [equal_rows(each, torch.zeros(2), self.items) for each in self.schema.stored]
        training = module.training
        with torch.no_grad():
            features = self.schema.batch(rows, last=True).features
            forward(module.eval(), features, as_kwargs=self.features_as_kwargs)
        return module.train(training)


def prepare(model: ModelBuilder) -> None:
    """Start what ``drawn_apart`` needs for a model, so that it need not wait later."""
    if _draws(model):
        with _LOCK:
            _running_server()


def _draws(model: ModelBuilder) -> bool:
    """Whether a builder may draw random numbers; copying an instance does not."""
    if isinstance(model, WithFrozenValues):
        return _draws(model.model)
    return not (isinstance(model, functools.partial) and model.func is copy.deepcopy)


def serve(control: int) -> None:
    """Fork a process for each model, until this end is closed; the server process runs this.

    Args:
        control: file descriptor of the socket that delivers those of the connections.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    with socket.socket(fileno=control) as connections:
        while received := socket.recv_fds(connections, 1, 1)[1]:
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                connections.close()
                with socket.socket(fileno=received[0]) as connected:
                    threading.Thread(target=_leave_with, args=(connected,), daemon=True).start()
                    _build(connected)
                os._exit(0)
            os.close(received[0])


def _pickled(model: ModelBuilder) -> bytes:
    try:
        return pickled_apart(model)
    except Exception as error:  # any __reduce__ may raise anything
        raise ModelError(
            "the function that builds the model cannot be sent to another process, as it must "
            f"be to each worker: {message_of(error)}"
        ) from error


def _leave_with(connected: socket.socket) -> None:
    """End this process once nobody wants its model any more."""
    poll = select.poll()
    poll.register(connected, 0)  # reports only that the other end has left
    poll.poll()
    os._exit(1)


def _build(connected: socket.socket) -> None:
    try:
        with connected.makefile("rb") as request:
            sys.path[:], folder, environment, settings, seed, payload = pickle.load(request)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        model: ModelBuilder = cloudpickle.loads(payload)
        seed_worker(seed)
        with settings.hold():
            module = model().cpu()
        state = [*(group.flat for group in flatten(module)), *frozen_values(module)]
    except BaseException as error:  # whatever the user's code raises
        state, header = [], {"error": f"{message_of(error)}"}
    else:
        header = {"layout": _layout(state)}
    with suppress(BrokenPipeError), connected.makefile("wb") as reply:
        reply.write(json.dumps(header).encode() + b"\n")
        for values in state:
            reply.write(octets_of(values.contiguous().view(-1)))


def _layout(state: Sequence[Tensor]) -> str:
    return ", ".join(
        f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}" for each in state
    )


def _receive(file: BinaryIO, replica: Replica) -> None:
    header = json.loads(file.readline() or b"{}")
    state = [*replica.segments(with_optimizer=False), *frozen_values(replica.module)]
    layout = _layout(state)
    if "layout" not in header:
        raise ModelError(
            "the model cannot be built in a separate process, as each worker does: "
            f"{header.get('error', 'the process exited; its stderr may say why')}"
        )
    if header["layout"] != layout:
        raise ModelError(
            "the model comes out different when built in a separate process, as each worker "
            f"does: {header['layout']} there, {layout} here. It must not depend on state of "
            "this process alone, such as a variable set after the import"
        )
    for values in state:
        received = torch.empty(values.numel(), dtype=values.dtype)
        if file.readinto(octets_of(received)) != received.nbytes:  # type: ignore[attr-defined]
            raise EOFError("the process ended in the middle of the values")
        with torch.inference_mode():  # the target may be an inference tensor
            values.copy_(received.view(values.shape))
    replica.take_as_frozen()


@contextmanager
def _explained(deadline_s: float) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, ValueError) as error:
        raise ModelError(
            "the model could not be built in a separate process, where nothing else draws "
            f"random numbers: {error!r} (it may take {deadline_s:g} s)"
        ) from error


class _Server:
    """The process that the others are forked from."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # what the model prints is printed here too
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is meant for this process
            )
        assert self.process.stdin is not None
        with self.process.stdin as stdin:
            pickle.dump(sys.path, stdin)

    def connect(self) -> socket.socket:
        """Fork a process; returns the connection to it."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"\0"], [theirs.fileno()])
        return ours


_LOCK = threading.Lock()
_server: _Server | None = None


def _running_server() -> _Server:
    global _server
    if _server is None or _server.process.poll() is not None:
        _server = _Server()
    return _server


def _connect() -> socket.socket:
    with _LOCK:
        return _running_server().connect()
