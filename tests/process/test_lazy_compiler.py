"""torch's compiler is not imported by what does not compile, and is all there for what does.

Whether a module was imported is a fact about a process, so each test has one of its own.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
from subprocesses import printed_by

from sparkdl.process.lazy_compiler import COMPILER, defer_compiler

START = """
import sys
import torch
from sparkdl.process.lazy_compiler import COMPILER, defer_compiler

def arrived():
    # the stand-in has the package's name; its modules only come with the compiler itself
    return any(name.startswith(COMPILER + ".") for name in sys.modules)

def steps(kind):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4, 3))
    optimizer = kind([weight], lr=0.01)
    def closure():
        optimizer.zero_grad()
        loss = (weight ** 2).sum()
        loss.backward()
        if kind is torch.optim.SparseAdam:
            weight.grad = weight.grad.to_sparse()
        return loss
    for _ in range(2):
        optimizer.step(closure)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step(closure)
    return weight.detach().clone()

kinds = [
    kind for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
]
"""


def in_a_process(code: str, *, start: str = START) -> None:
    """Run code in a Python of its own; fails with its traceback if it fails."""
    printed_by("-c", start + textwrap.dedent(code), cwd=Path(__file__).parents[1])


@pytest.mark.slow
def test_after_a_fit_nothing_stands_in_for_it_and_the_users_optimizers_import_it() -> None:
    in_a_process("""
        from sparkdl.process.lazy_compiler import compiler_deferred
        before = []
        for _ in range(2):
            with compiler_deferred():
                before.append(steps(torch.optim.Adam))
                assert COMPILER in sys.modules
            assert COMPILER not in sys.modules
            assert not arrived()
        after = steps(torch.optim.Adam)
        assert arrived() and sys.modules[COMPILER].__file__
        assert all(torch.equal(each, after) for each in before)
        with compiler_deferred():
            assert sys.modules[COMPILER].__file__
        assert sys.modules[COMPILER].__file__
        assert torch.equal(steps(torch.optim.Adam), after)
    """)


@pytest.mark.slow
def test_a_thread_of_the_user_may_compile_while_a_fit_has_something_stand_in() -> None:
    in_a_process("""
        import threading
        from sparkdl.process.lazy_compiler import compiler_deferred
        made = []
        def compiles():
            graph = lambda graph, inputs: made.append(graph) or graph.forward
            made.append(torch.compile(lambda x: x + 1, backend=graph)(torch.ones(2)))
        with compiler_deferred():
            steps(torch.optim.SGD)
            thread = threading.Thread(target=compiles)
            thread.start()
        thread.join()
        assert len(made) == 2 and made[1].tolist() == [2.0, 2.0]
        assert sys.modules[COMPILER].__file__
        steps(torch.optim.SGD)
    """)


@pytest.mark.slow
def test_nothing_stands_in_for_it_in_the_driver_outside_of_a_fit() -> None:
    in_a_process("""
        from sparkdl import ParameterAveraging, TorchEstimator
        from sparkdl.driver import build_replica, initial_center
        from sparkdl.estimator.checks.rehearsal import require_steady_state
        assert COMPILER not in sys.modules

        kind = torch.optim.Adam
        require_steady_state(kind, None)
        replica = build_replica(lambda: torch.nn.Linear(2, 1), kind, torch.nn.MSELoss(), seed=0)
        initial_center(replica, with_optimizer=True)
        assert COMPILER not in sys.modules or sys.modules[COMPILER].__file__
    """)


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


@pytest.mark.slow
def test_no_optimizer_of_torch_imports_the_compiler_and_all_step_as_with_it() -> None:
    in_a_process("""
        defer_compiler()
        assert len(kinds) >= 12, kinds
        deferred = [steps(kind) for kind in kinds]
        assert not arrived()

        import torch._dynamo
        torch._dynamo.reset()
        assert arrived()
        for kind, expected in zip(kinds, deferred):
            assert torch.equal(steps(kind), expected), kind
    """)


@pytest.mark.slow
def test_without_the_deferral_an_optimizer_does_import_the_compiler() -> None:
    """Guards the tests here: if torch mends this, sparkdl.process.lazy_compiler can go."""
    in_a_process("""
        steps(torch.optim.SGD)
        assert arrived()
    """)


def test_a_whole_run_does_not_import_the_compiler() -> None:
    in_a_process("""
        defer_compiler()
        from sparkdl.testing import run_world
        from toys import classification, make_job, mlp
        run_world(make_job(mlp(), epochs=2), classification([8, 8]).shards())
        assert not arrived()
    """)


@pytest.mark.slow
def test_a_module_of_the_compiler_imported_later_is_the_one_that_the_compiler_uses() -> None:
    in_a_process("""
        defer_compiler()
        steps(torch.optim.Adam)
        import torch._dynamo.config
        from torch._dynamo.utils import counters
        import torch._dynamo.eval_frame, torch._dynamo.convert_frame, torch._dynamo.symbolic_convert
        assert torch._dynamo is sys.modules[COMPILER]
        assert torch._dynamo.config is sys.modules["torch._dynamo.config"]
        assert torch._dynamo.config is torch._dynamo.eval_frame.config
        assert torch._dynamo.config is torch._dynamo.convert_frame.config
        assert counters is torch._dynamo.symbolic_convert.counters
        steps(torch.optim.Adam)
    """)


@pytest.mark.slow
def test_any_first_import_of_a_part_finds_the_one_that_the_compiler_uses() -> None:
    in_a_process("""
        defer_compiler()
        from torch._dynamo.variables.builder import VariableBuilder
        import torch._dynamo.symbolic_convert as user
        assert user.VariableBuilder is VariableBuilder
    """)


@pytest.mark.slow
def test_a_part_that_does_not_exist_is_an_import_error_as_ever() -> None:
    in_a_process("""
        defer_compiler()
        for _ in range(2):
            try:
                import torch._dynamo.nothing_of_this_name
            except ModuleNotFoundError as error:
                assert "nothing_of_this_name" in str(error)
            else:
                raise AssertionError
        assert torch._dynamo.config is torch._dynamo.eval_frame.config
    """)


@pytest.mark.slow
def test_a_model_compiled_later_is_traced_and_optimizers_go_on_working() -> None:
    in_a_process("""
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
    """)


@pytest.mark.slow
def test_an_optimizer_step_inside_compiled_code_is_kept_out_of_graphs_as_ever() -> None:
    in_a_process("""
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
    """)


@pytest.mark.slow
def test_functions_and_modules_that_a_user_keeps_from_the_compiler_are_kept_from_it() -> None:
    in_a_process("""
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
    """)


def test_looking_over_the_loaded_modules_does_not_import_the_compiler() -> None:
    in_a_process("""
        import inspect
        defer_compiler()
        for module in list(sys.modules.values()):
            for name in ("__file__", "__warningregistry__", "__spec__", "__wrapped__"):
                hasattr(module, name)
        inspect.getmodule(steps)
        inspect.stack()
        import cloudpickle
        cloudpickle.loads(cloudpickle.dumps(steps))
        assert not arrived()
    """)


@pytest.mark.slow
def test_a_compiler_that_is_there_already_is_left_alone() -> None:
    in_a_process("""
        import torch._dynamo
        there = sys.modules[COMPILER]
        defer_compiler()
        assert sys.modules[COMPILER] is there is torch._dynamo
    """)


@pytest.mark.slow
def test_threads_that_want_the_compiler_at_once_get_the_same() -> None:
    in_a_process("""
        import importlib, threading
        from concurrent.futures import ThreadPoolExecutor
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
        import torch._dynamo.eval_frame
        assert all(config is torch._dynamo.eval_frame.config for config in found)
    """)
