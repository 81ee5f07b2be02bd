"""A worker's process: allocator, torch, random numbers, and alarms."""

from __future__ import annotations

import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from subprocesses import printed_by
from torch import Tensor

from sparkdl.errors import DeadlineError
from sparkdl.process.interrupts import raise_after
from sparkdl.process.lazy_compiler import COMPILER, defer_compiler
from sparkdl.process.randomness import (
    borrowed_random_numbers,
    random_state,
    seed_worker,
    set_random_state,
)
from sparkdl.process.torch_settings import TorchSettings

THREADS, MEBIBYTES = 6, 40
SCRIPT = f"""
import sys, threading
from pathlib import Path

def resident():
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) >> 10

if sys.argv[1] == "shared":
    from sparkdl.process.torch_settings import share_freed_memory
    share_freed_memory()
turn, done, over = threading.Lock(), threading.Semaphore(0), threading.Event()

def work():
    with turn:  # one after another, so that what one frees is enough for the next
        for _ in range(2):
            held = [bytes([1]) * (1 << 20) for _ in range({MEBIBYTES})]
            del held
    done.release()
    over.wait()

large = bytes([1]) * (31 << 20)
del large  # glibc adapts: it then keeps up to twice as much of what is freed
before = resident()
threads = [threading.Thread(target=work) for _ in range({THREADS})]
for thread in threads:
    thread.start()
for _ in threads:
    done.acquire()
print(resident() - before)
over.set()
"""


def kept_mebibytes(how: str) -> int:
    child = [sys.executable, "-c", SCRIPT, how]
    return int(subprocess.run(child, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux, and glibc")
def test_threads_that_share_freed_memory_keep_it_once() -> None:
    assert kept_mebibytes("shared") < 2 * MEBIBYTES
    assert kept_mebibytes("each") > 3 * MEBIBYTES


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


@pytest.mark.nightly
def test_the_compiler_is_imported_when_it_is_used_and_not_before() -> None:
    """Each function of the program states a fact, and a process that fails names its own."""
    program = Path(__file__).with_name("compiler_facts.py")
    printed_by(program, cwd=Path(__file__).parents[1])


@pytest.mark.parametrize(
    ("version", "stands_in"),
    [("2.13.0", True), ("2.14.1+cpu", True), ("2.12.1", False), ("2.130.0", False), ("3.0", False)],
)
def test_it_is_stood_in_for_only_in_versions_of_torch_with_which_that_was_tested(
    version: str, stands_in: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.__version__", version)
    monkeypatch.setitem(sys.modules, COMPILER, sys)
    del sys.modules[COMPILER]
    defer_compiler()
    assert (COMPILER in sys.modules) is stands_in


DEADLINE_S = 60.0


def draws(seed: int, *sizes: int) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.cat([*map(torch.rand, sizes)])


@pytest.mark.parametrize(("seed", "stream"), [((7,), 7), ((), 3)])
def test_a_seed_gives_its_stream_and_in_any_case_the_callers_goes_on_as_if_nothing_had_been(
    seed: tuple[int, ...], stream: int
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        with borrowed_random_numbers(*seed):
            assert torch.equal(torch.rand(4), draws(stream, 4))
        assert torch.equal(torch.rand(4), draws(3, 4))


def test_threads_do_not_draw_from_each_others_streams() -> None:
    begun = threading.Barrier(2)

    def draw(seed: int) -> Tensor:
        begun.wait(DEADLINE_S)
        with borrowed_random_numbers(seed):
            drawn = [torch.rand(1)]
            threading.Event().wait(0.05)  # long enough for the other to seed the stream again
            return torch.cat([*drawn, torch.rand(3)])

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(draw, (1, 2))
    assert torch.equal(one, draws(1, 1, 3))
    assert torch.equal(other, draws(2, 1, 3))


@pytest.fixture
def _streams_are_put_back() -> Iterator[None]:
    state = random_state(torch.device("cpu"))
    yield
    set_random_state(state, torch.device("cpu"))


def draw_everywhere() -> list[float]:
    drawn = [float(torch.rand(())), np.random.normal(), random.random(), random.gauss(0, 1)]
    return [*drawn, float(torch.randn(())), np.random.random()]


@pytest.mark.usefixtures("_streams_are_put_back")
@pytest.mark.parametrize("before", range(3))
def test_every_stream_goes_on_where_it_was(before: int) -> None:
    """Normal numbers are made two at a time, so one more of them may be waiting."""
    seed_worker(5)
    for _ in range(before):
        draw_everywhere()
    state = random_state(torch.device("cpu"))
    drawn = draw_everywhere()
    seed_worker(6)
    draw_everywhere()
    set_random_state(state, torch.device("cpu"))
    assert draw_everywhere() == drawn


@pytest.mark.usefixtures("_streams_are_put_back")
def test_seeds_of_any_size_give_streams_of_their_own() -> None:
    streams = []
    for seed in (0, 1, 2**32, 2**63 - 1):
        seed_worker(seed)
        streams.append(tuple(draw_everywhere()))
    assert len(set(streams)) == 4


@pytest.fixture(autouse=True)
def _same_alarm() -> Iterator[None]:
    """That of the test's own timeout goes on afterwards."""
    handler, (left, _) = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    yield
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, left)


def test_an_alarm_interrupts_what_hangs_and_says_where() -> None:
    with pytest.raises(DeadlineError, match="test_an_alarm_interrupts_what_hangs_and_says_where"):
        hang(raise_after(0.01, DeadlineError))


def hang(_: object) -> None:
    time.sleep(600)


def test_an_alarm_that_is_called_off_is_not_raised() -> None:
    handler = signal.getsignal(signal.SIGALRM)
    raise_after(600.0, DeadlineError)()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) == handler
