"""A seed gives a model its initial values, whatever the threads of this process draw meanwhile."""

from __future__ import annotations

import copy
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from toys import classification, make_job, mlp, schema

from sparkdl.driver import first_replica
from sparkdl.errors import ModelError
from sparkdl.process.randomness import random_state, streams_put_back
from sparkdl.replica import initial
from sparkdl.strategies import ParameterAveraging
from sparkdl.testing import run_world

cloudpickle.register_pickle_by_value(sys.modules[__name__])

CPU = torch.device("cpu")
WAIT_S = 30.0
"""The longest that a test waits for anything."""


def drawn() -> nn.Module:
    """From all three streams, which somebody else may disturb between any two of the draws."""
    module = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Linear(64, 3)).double()
    with torch.no_grad():
        module[0].bias.copy_(torch.from_numpy(np.random.normal(size=64)))
        for index in range(3):
            module[2].bias[index] = random.random()
    module.register_buffer("mask", torch.rand(3).to(torch.bfloat16))
    return module


def draw_and_seed() -> None:
    torch.rand(2)
    np.random.rand()
    random.random()
    torch.manual_seed(1)


@contextmanager
def disturbed() -> Iterator[None]:
    over = threading.Event()

    def disturb() -> None:
        while not over.is_set():
            draw_and_seed()

    thread = threading.Thread(target=disturb)
    with streams_put_back():
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def state_of(build: Callable[[], nn.Module], **changes: object) -> list[Tensor]:
    replica = first_replica(make_job(build, **changes))
    return [values.clone() for values in replica.segments(with_optimizer=False)]


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def test_other_threads_change_nothing_of_what_a_seed_draws() -> None:
    quiet = state_of(drawn)
    with disturbed():
        assert all(same(state_of(drawn), quiet) for _ in range(10))
    assert not same(state_of(drawn, seed=12), quiet)


def test_nor_of_what_is_never_trained() -> None:
    def frozen() -> nn.Module:
        module = drawn()
        module[0].requires_grad_(False)
        return module

    def both() -> tuple[str, Tensor]:
        replica = first_replica(make_job(frozen))
        return replica.frozen.fingerprint, replica.module[0].weight

    fingerprint, values = both()
    with disturbed():
        for _ in range(5):
            found, drawn_again = both()
            assert (found, drawn_again.tolist()) == (fingerprint, values.tolist())


def test_nor_of_the_parameters_that_a_training_ends_with() -> None:
    def train() -> list[Tensor]:
        job = make_job(partial(nn.Linear, 6, 3, dtype=torch.float64))
        return list(run_world(job, classification([8, 8]).shards()).module.parameters())

    quiet = train()
    with disturbed():
        assert all(same(train(), quiet) for _ in range(5))


def test_the_callers_own_streams_go_on_where_they_were() -> None:
    before = random_state(CPU)
    state_of(drawn)
    after = random_state(CPU)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_copy_of_an_instance_needs_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial, "_connect", None)
    model = mlp()
    assert same(state_of(model)[:1], [torch.cat([p.view(-1) for p in model.parameters()])])


def test_a_model_that_is_found_nowhere_else_is_told_of() -> None:
    here = os.getpid()

    def build() -> nn.Module:
        if os.getpid() != here:
            raise ImportError("No module named 'timm'")
        return mlp()

    with pytest.raises(ModelError, match=r"each worker does: ImportError: No module named 'timm'"):
        state_of(build)


def test_a_model_that_cannot_travel_is_told_of() -> None:
    lock = threading.Lock()

    def build() -> nn.Module:
        with lock:
            return mlp()

    with pytest.raises(
        ModelError, match=r"to each worker: TypeError: cannot pickle '_thread.lock'"
    ):
        state_of(build)


def test_a_model_that_is_another_one_elsewhere_is_told_of() -> None:
    here = os.getpid()
    build = lambda: nn.Linear(6, 3 if os.getpid() == here else 4)  # noqa: E731
    with pytest.raises(ModelError, match=r"float32 \[28\] there, float32 \[21\] here"):
        state_of(build)


@pytest.mark.parametrize(
    "deed", [lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: os._exit(1)]
)
def test_a_process_that_dies_is_told_of(deed: Callable[[], None]) -> None:
    here = os.getpid()

    def build() -> nn.Module:
        if os.getpid() != here:
            deed()
        return mlp()

    with pytest.raises(ModelError, match="the process exited"):
        state_of(build)


def sleeps_in(folder: Path) -> nn.Module:
    (folder / str(os.getpid())).touch()
    time.sleep(600)
    return mlp()


def test_a_model_that_takes_for_ever_ends_at_the_deadline(tmp_path: Path) -> None:
    with (
        pytest.raises(ModelError, match=r"it may take 0\.5 s"),
        initial.drawn_apart(partial(sleeps_in, tmp_path), 7, 0.5) as overwrite,
    ):
        overwrite(first_replica(make_job(mlp())))


def test_a_model_that_nobody_wants_any_more_is_not_built_to_the_end(tmp_path: Path) -> None:
    with initial.drawn_apart(partial(sleeps_in, tmp_path), 7, WAIT_S):
        assert eventually(lambda: list(tmp_path.iterdir()))
    (process,) = tmp_path.iterdir()
    assert eventually(lambda: not Path("/proc", process.name).exists())


def eventually(happened: Callable[[], object]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(happened())


def test_what_all_are_forked_from_is_started_again() -> None:
    quiet = state_of(drawn)
    assert initial._server is not None
    initial._server.process.kill()
    initial._server.process.wait()
    assert same(state_of(drawn), quiet)


def test_it_sees_the_folder_and_environment_of_now(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    state_of(drawn)  # what is forked from has its own by now
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WIDTH", "5")

    def build() -> nn.Module:
        return nn.Linear(int(os.environ["WIDTH"]), len(os.getcwd()))

    assert len(state_of(build)[0]) == 6 * len(str(tmp_path))


def test_it_draws_with_torchs_settings_of_this_process() -> None:
    state_of(drawn)  # what is forked from has its own by now
    torch.set_default_dtype(torch.float64)
    try:
        (parameters,) = state_of(partial(nn.Linear, 3, 2))
    finally:
        torch.set_default_dtype(torch.float32)
    assert parameters.dtype == torch.float64


FLOATS = schema(dtype=torch.float32)


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Linear(8, 3))


def test_lazy_layers_learn_their_shapes_and_nothing_else_from_a_batch_of_zeros() -> None:
    assert initial.has_lazy_parameters(lazy())
    torch.manual_seed(5)
    module = initial.Initialized(lazy, FLOATS)()
    assert not initial.has_lazy_parameters(module)
    assert module[0].weight.shape == (8, 6)
    assert all(each.training for each in module.modules())
    assert module[1].num_batches_tracked == 0
    torch.manual_seed(5)
    again = initial.Initialized(lazy, FLOATS)()
    assert all(map(torch.equal, module.parameters(), again.parameters()))


INSTANCE = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize("given", [lazy, partial(copy.deepcopy, INSTANCE)])
def test_a_lazy_model_trains_on_every_worker_from_the_same_values(given: Any) -> None:
    model = initial.Initialized(given, FLOATS)
    job = make_job(model, schema=FLOATS, strategy=ParameterAveraging(2), epochs=2)
    shards = classification([12, 8]).shards()
    first, second = (run_world(job, shards).module for _ in range(2))
    assert first[0].weight.shape == (8, 6)
    assert all(map(torch.equal, first.parameters(), second.parameters()))
