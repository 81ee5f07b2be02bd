"""The state of a worker, and errors of users' own."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import signal
from functools import partial
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from every_row import every, every_row
from hypothesis import given, settings
from misbehaving import Marked, marked
from subprocesses import run_python
from torch import Tensor, nn
from toys import make_job

from sparkdl.averager.headers import failure_header, stopped_header
from sparkdl.checkpoint.tensor_file import read_tensors, write_tensors
from sparkdl.errors import CheckpointError, CollectiveError, WorkerError
from sparkdl.process.randomness import random_state, streams_put_back
from sparkdl.strategies import GradientAllReduce
from sparkdl.testing import run_world
from sparkdl.transport.framing import MAX_HEADER_BYTES, header_message
from sparkdl.worker.state import pack_worker_state, restart_state, unpack_worker_state

pytestmark = pytest.mark.usefixtures("nobody_stays")


CPU = torch.device("cpu")

NAMES_OF_TORCH = ["SGD", "Adam", "RMSprop", "NAdam", "Adagrad", "Adadelta", "Adamax", "ASGD"]
NAMES_OF_TORCH += ["RAdam", "Rprop", "Adafactor"]
OPTIMIZERS = {
    **{name: getattr(torch.optim, name) for name in NAMES_OF_TORCH},
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, amsgrad=True),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))


def step(module: nn.Module, optimizer: torch.optim.Optimizer, times: int) -> None:
    for _ in range(times):
        optimizer.zero_grad()
        module(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()


def bits(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().view(-1) for p in module.parameters()])


@every("name", OPTIMIZERS)
def test_training_goes_on_with_the_same_bits(name: str) -> None:
    module, build = network(), OPTIMIZERS[name]
    optimizer = build(module.parameters())
    step(module, optimizer, 3)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.5  # as a schedule does
    octets = pack_worker_state(optimizer, CPU, center_has_optimizer=False)
    other = copy.deepcopy(module)
    step(module, optimizer, 3)

    torch.manual_seed(99)
    resumed = build(other.parameters())
    unpack_worker_state(octets, resumed, CPU)
    step(other, resumed, 3)
    assert torch.equal(bits(other), bits(module))


@every("dtype", [torch.complex64, torch.complex128])
def test_complex_parameters_go_on_with_the_same_bits(dtype: torch.dtype) -> None:
    weights = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j], dtype=dtype))
    optimizer = torch.optim.Adam([weights])

    def take_steps(trained: nn.Parameter, by: torch.optim.Optimizer) -> None:
        for _ in range(2):
            by.zero_grad()
            trained.abs().square().sum().backward()
            by.step()

    take_steps(weights, optimizer)
    octets = pack_worker_state(optimizer, CPU, center_has_optimizer=False)
    other = nn.Parameter(weights.detach().clone())
    take_steps(weights, optimizer)

    resumed = torch.optim.Adam([other])
    unpack_worker_state(octets, resumed, CPU)
    take_steps(other, resumed)
    assert torch.equal(other, weights)


def test_complex_state_that_the_center_holds_is_left_out() -> None:
    weights = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer = torch.optim.Adam([weights])
    weights.abs().sum().backward()
    optimizer.step()
    octets = pack_worker_state(optimizer, CPU, center_has_optimizer=True)
    tensors, _ = read_tensors(io.BytesIO(octets))
    assert not [name for name in tensors if name.startswith("state.0.exp_avg")]


def test_state_that_the_center_holds_is_left_out_and_hyperparameters_keep_their_types() -> None:
    module = network()
    optimizer = torch.optim.Adam(module.parameters(), betas=(0.8, 0.99))
    step(module, optimizer, 1)
    octets = pack_worker_state(optimizer, CPU, center_has_optimizer=True)
    fresh = torch.optim.Adam(network().parameters())
    unpack_worker_state(octets, fresh, CPU)
    assert not any(fresh.state.values())
    assert fresh.param_groups[0]["betas"] == (0.8, 0.99)
    assert fresh.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


def test_what_a_strategy_remembers_comes_back_beside_the_rest() -> None:
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    kept = {"residual": torch.arange(3.0), "rounds": 7, "group.0.lr": 0.5}
    octets = pack_worker_state(optimizer, CPU, center_has_optimizer=True, of_strategy=kept)
    found = unpack_worker_state(octets, optimizer, CPU)
    assert torch.equal(found.pop("residual"), kept.pop("residual"))
    assert found == kept
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_what_only_pickle_could_save_is_refused_in_words() -> None:
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    optimizer.param_groups[0]["hook"] = object()
    with pytest.raises(CheckpointError, match="SGD keeps state that cannot be saved"):
        pack_worker_state(optimizer, CPU, center_has_optimizer=True)


def test_a_restart_without_what_only_pickle_could_save_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def restarted(kept: object) -> list[str]:
        optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
        optimizer.param_groups[0]["kept"] = kept
        schedule = SimpleNamespace(steps=0)
        replica = SimpleNamespace(optimizer=optimizer, device=CPU, schedule=schedule)
        run: Any = SimpleNamespace(replica=replica, state=None)
        caplog.clear()
        unpack_worker_state(restart_state(run, GradientAllReduce()), optimizer, CPU)
        return [record.getMessage() for record in caplog.records]

    assert restarted(0.5) == []
    (message,) = restarted(object())
    assert message.startswith("what is not averaged of the state of SGD starts over")
    assert "object is not JSON serializable" in message


@every("kept", [{1: 0.5}, [{"by step": {2: 1}}]])
def test_a_key_that_would_come_back_as_a_string_is_refused_in_words(kept: Any) -> None:
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    optimizer.state[optimizer.param_groups[0]["params"][0]]["history"] = kept
    with pytest.raises(CheckpointError, match=r"SGD keeps state.*has the key \d"):
        pack_worker_state(optimizer, CPU, center_has_optimizer=True)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)
NAMES = st.sampled_from(["state.0.exp_avg", "group.0.lr", "group.7.lr", "random.cpu", "state.9.x"])


WHOLE = st.fixed_dictionaries(
    {"values": VALUES | st.dictionaries(NAMES, VALUES), "on_device": VALUES}
)
TENSORS = st.sampled_from([torch.ones(2, 3), torch.zeros(0), torch.tensor(-7)])


@settings(max_examples=40)
@given(
    description=VALUES | WHOLE,
    dropped=st.sets(st.sampled_from(sorted(random_state(CPU)))),
    put=st.dictionaries(NAMES, TENSORS, max_size=2),
)
def test_a_state_that_says_anything_is_taken_in_or_refused_in_words(
    description: Any, dropped: set[str], put: dict[str, Tensor]
) -> None:
    kept = {name: t for name, t in random_state(CPU).items() if name not in dropped}
    file = io.BytesIO()
    write_tensors(file, kept | put, {"own": json.dumps(description)})
    optimizer = torch.optim.Adam(network().parameters())
    with streams_put_back(), contextlib.suppress(CheckpointError):
        unpack_worker_state(file.getvalue(), optimizer, CPU)


def test_a_state_nested_without_end_is_refused_in_words() -> None:
    file = io.BytesIO()
    write_tensors(file, {}, {"own": "[" * 100_000})
    with pytest.raises(CheckpointError, match="does not fit"):
        unpack_worker_state(file.getvalue(), torch.optim.Adam(network().parameters()), CPU)


def test_the_state_of_another_optimizer_is_refused() -> None:
    two = torch.optim.SGD(network().parameters(), lr=0.1)
    two.add_param_group({"params": nn.Linear(2, 2).parameters()})
    octets = pack_worker_state(two, CPU, center_has_optimizer=False)
    with pytest.raises(CheckpointError, match="does not fit"):
        unpack_worker_state(octets, torch.optim.SGD(network().parameters(), lr=0.1), CPU)


@every_row(
    ({"values": [], "on_device": []}, []),
    ({"values": {"group.0.lr": 1, "state.99.step": 2}, "on_device": []}, []),
    (None, []),
    ({"values": {}, "on_device": []}, [-1] * 625),
    ({"values": {}, "on_device": []}, [1 << 40] * 625),
)
def test_a_state_that_no_worker_writes_is_refused(said: Any, words: list[int]) -> None:
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    octets = pack_worker_state(optimizer, CPU, center_has_optimizer=False)
    tensors, _ = read_tensors(io.BytesIO(octets))
    if words:
        tensors["random.python"] = torch.tensor(words)
    file = io.BytesIO()
    write_tensors(file, tensors, {"own": json.dumps(said)})
    with streams_put_back(), pytest.raises(CheckpointError, match="does not fit"):
        unpack_worker_state(file.getvalue(), optimizer, CPU)


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class NoException(BaseException):
    pass


class CannotBePickled(Exception):
    def __reduce__(self) -> str:
        raise TypeError("not me")


RAISED = {
    "Silent: <exception str": Silent(),
    "NoException: of its own": NoException("of its own"),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "GeneratorExit": GeneratorExit(),
    "StopIteration": StopIteration(),
    "SystemExit: out of here": SystemExit("out of here"),
    "SystemExit: 3": SystemExit(3),
    "SystemExit: 0": SystemExit(0),
    "ValueError: zz": ValueError("z" * 50_000_000),
    "ValueError: half": ValueError("half \ud800 a pair"),
    "CannotBePickled: x": CannotBePickled("x"),
}


class RaisesAt(Marked):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = [error]  # copied with the model, as nobody can copy every exception

    def __deepcopy__(self, memo: dict[int, object]) -> RaisesAt:
        return RaisesAt(self.error[0])

    def at_mark(self) -> None:
        raise self.error[0]


@pytest.mark.parametrize("named", RAISED)
def test_whatever_a_model_raises_is_the_workers_error(named: str) -> None:
    job = make_job(RaisesAt(RAISED[named]), max_failures=3)
    with pytest.raises(WorkerError, match="rank 1, epoch 1, step 3") as caught:
        run_world(job, marked([12, 12], 12 + 9).shards())
    assert named in str(caught.value)
    assert "in at_mark" in caught.value.worker_traceback
    assert len(str(caught.value)) < 30_000
    str(caught.value).encode()


def test_no_error_makes_a_header_too_long() -> None:
    text = "\U0001f525" * 20_000_000
    worker = WorkerError(text, rank=0, epoch=0, step=0, worker_traceback=text)
    failures = failure_header(worker), failure_header(CollectiveError(text))
    for header in (*failures, stopped_header(text)):
        assert len(header_message(header)) < MAX_HEADER_BYTES


INTERRUPTED = """
import json, os, signal, sys
from sparkdl.process.interrupts import Interrupted, interrupted_by_signals_alone
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
caught = {}
with interrupted_by_signals_alone():
    for name, interrupt in {
        "raised": lambda: exec("raise KeyboardInterrupt"),
        "sent": lambda: os.kill(os.getpid(), signal.SIGINT),
    }.items():
        try:
            interrupt()
        except KeyboardInterrupt as error:
            caught[name] = isinstance(error, Interrupted)
    print(json.dumps(caught), flush=True)
    os.kill(os.getpid(), signal.SIGINT)
print("not reached")
"""


def test_an_interrupt_of_the_process_differs_from_one_that_the_user_raises() -> None:
    ended = run_python("-c", INTERRUPTED)
    assert json.loads(ended.stdout) == {"raised": False, "sent": True}
    assert ended.returncode == -signal.SIGINT
