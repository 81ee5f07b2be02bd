"""A program of facts about imports of torch's compiler, each checked in a forked process."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from sparkdl.process.lazy_compiler import COMPILER, compiler_deferred, defer_compiler

FACTS: list[Callable[[], None]] = []
kinds = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
]


def fact(function: Callable[[], None]) -> Callable[[], None]:
    """Have a function checked."""
    FACTS.append(function)
    return function


def arrived() -> bool:
    # the stand-in has the package's name; its modules only come with the compiler itself
    return any(name.startswith(COMPILER + ".") for name in sys.modules)


def steps(kind: Any) -> Tensor:
    """A weight after some steps of an optimizer."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4, 3))
    optimizer = kind([weight], lr=0.01)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        if kind is torch.optim.SparseAdam:
            weight.grad = weight.grad.to_sparse()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step(closure)
    return weight.detach().clone()


@fact
def after_a_fit_nothing_stands_in_for_it_and_the_users_optimizers_import_it() -> None:
    before = []
    for _ in range(2):
        with compiler_deferred():
            before.append(steps(torch.optim.Adam))
            assert COMPILER in sys.modules
        assert COMPILER not in sys.modules
        assert not arrived()
    after = steps(torch.optim.Adam)
    assert arrived()
    assert sys.modules[COMPILER].__file__
    assert all(torch.equal(each, after) for each in before)
    with compiler_deferred():
        assert sys.modules[COMPILER].__file__
    assert sys.modules[COMPILER].__file__
    assert torch.equal(steps(torch.optim.Adam), after)


@fact
def a_thread_of_the_user_may_compile_while_a_fit_has_something_stand_in() -> None:
    made = []

    def compiles():
        def graph(graph: Any, inputs: Any) -> Any:
            made.append(graph)
            return graph.forward

        made.append(torch.compile(lambda x: x + 1, backend=graph)(torch.ones(2)))

    with compiler_deferred():
        steps(torch.optim.SGD)
        thread = threading.Thread(target=compiles)
        thread.start()
    thread.join()
    assert len(made) == 2
    assert made[1].tolist() == [2.0, 2.0]
    assert sys.modules[COMPILER].__file__
    steps(torch.optim.SGD)


@fact
def nothing_stands_in_for_it_in_the_driver_outside_of_a_fit() -> None:
    from sparkdl.driver import initial_center
    from sparkdl.estimator.checks.preflight import require_steady_state
    from sparkdl.replica import Replica

    assert COMPILER not in sys.modules

    kind = torch.optim.Adam
    require_steady_state(kind, None)
    replica = Replica(torch.nn.Linear(2, 1), kind, torch.nn.MSELoss())
    initial_center(replica, with_optimizer=True)
    assert COMPILER not in sys.modules or sys.modules[COMPILER].__file__


@fact
def no_optimizer_of_torch_imports_the_compiler_and_all_step_as_with_it() -> None:
    defer_compiler()
    assert len(kinds) >= 12, kinds
    deferred = [steps(kind) for kind in kinds]
    assert not arrived()

    import torch._dynamo

    torch._dynamo.reset()
    assert arrived()
    for kind, expected in zip(kinds, deferred, strict=True):
        assert torch.equal(steps(kind), expected), kind


@fact
def without_the_deferral_an_optimizer_does_import_the_compiler() -> None:
    """Guards the tests here: if torch mends this, sparkdl.process.lazy_compiler can go."""
    steps(torch.optim.SGD)
    assert arrived()


@fact
def a_whole_run_does_not_import_the_compiler() -> None:
    defer_compiler()
    from toys import classification, make_job, mlp

    from sparkdl.testing import run_world

    run_world(make_job(mlp(), epochs=2), classification([8, 8]).shards())
    assert not arrived()


@fact
def a_module_of_the_compiler_imported_later_is_the_one_that_the_compiler_uses() -> None:
    global torch
    defer_compiler()
    steps(torch.optim.Adam)
    import torch._dynamo.config
    import torch._dynamo.convert_frame
    import torch._dynamo.eval_frame
    import torch._dynamo.symbolic_convert
    from torch._dynamo.utils import counters

    assert torch._dynamo is sys.modules[COMPILER]
    assert torch._dynamo.config is sys.modules["torch._dynamo.config"]
    assert torch._dynamo.config is torch._dynamo.eval_frame.config
    assert torch._dynamo.config is torch._dynamo.convert_frame.config
    assert counters is torch._dynamo.symbolic_convert.counters
    steps(torch.optim.Adam)


@fact
def a_part_that_does_not_exist_is_an_import_error_as_ever() -> None:
    global torch
    defer_compiler()
    for _ in range(2):
        try:
            import torch._dynamo.nothing_of_this_name
        except ModuleNotFoundError as error:
            told = str(error)
        assert "nothing_of_this_name" in told
    assert torch._dynamo.config is torch._dynamo.eval_frame.config


@fact
def a_model_compiled_later_is_traced_and_optimizers_go_on_working() -> None:
    defer_compiler()
    before = steps(torch.optim.SGD)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer.step()

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    rows = torch.randn(5, 3)
    expected = model(rows)
    for chosen in ("eager", backend):
        compiled = torch.compile(model, backend=chosen)
        assert torch.equal(compiled(rows), expected)
        compiled(rows).sum().backward()
    assert len(graphs) == 1
    old = model.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.weight, old)
    assert torch.equal(steps(torch.optim.SGD), before)


@fact
def an_optimizer_step_inside_compiled_code_is_kept_out_of_graphs_as_ever() -> None:
    defer_compiler()
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})

    @torch.compile(backend="eager")
    def step():
        (2 * weight).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    assert weight.tolist() == [0.0] * 3
    assert weight.grad is None


@fact
def functions_and_modules_that_a_user_keeps_from_the_compiler_are_kept_from_it() -> None:
    defer_compiler()

    @torch._dynamo.disable
    def plain():
        return torch.compiler.is_compiling()

    @torch._dynamo.disable(recursive=False)
    def with_options():
        return 1

    @torch.compiler.disable()
    def called():
        return torch.compiler.is_compiling()

    module = torch.compiler.disable(torch.nn.Linear(2, 2))
    assert isinstance(module, torch.nn.Module)
    assert len(list(module.parameters())) == 2
    assert (plain.__name__, with_options()) == ("plain", 1)
    assert torch.compile(lambda: (plain(), called()), backend="eager")() == (False, False)
    assert torch.compile(lambda: torch.compiler.is_compiling(), backend="eager")() is True


@fact
def threads_that_want_the_compiler_at_once_get_the_same() -> None:
    defer_compiler()
    together = threading.Barrier(6)

    def want(number):
        together.wait(30)
        if number % 2:
            return importlib.import_module("torch._dynamo.config")
        defer_compiler()
        return torch._dynamo.config

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(want, range(6), timeout=60))
    used = importlib.import_module("torch._dynamo.eval_frame").config
    assert all(config is used for config in found)


def holds(fact: Callable[[], None]) -> bool:
    """Whether a fact holds in a process that nothing else has used."""
    if child := os.fork():
        return os.waitpid(child, 0)[1] == 0
    try:
        fact()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())  # for toys
    assert len(FACTS) == 12
    kept = [holds(fact) for fact in FACTS]
    sys.exit(not all(kept))
