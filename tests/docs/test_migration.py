"""Every name of ours that the page about migration gives is one that this package has."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import sparkdl
import sparkdl.callbacks
import sparkdl.strategies

PAGE = (Path(__file__).parents[2] / "docs/migration.md").read_text()
PUBLIC: dict[str, Any] = {
    name: getattr(module, name)
    for module in (sparkdl.strategies, sparkdl.callbacks, sparkdl)
    for name in module.__all__
}


def arguments(of: Any) -> set[str]:
    return set(inspect.signature(of).parameters)


KNOWN = arguments(sparkdl.TorchEstimator) | arguments(sparkdl.run) | set(PUBLIC)


def exists(expression: str) -> bool:
    """Whether an argument, a public name, an attribute or a call of ours is one that there is."""
    node = ast.parse(expression.replace("...", "None"), mode="eval").body
    called = node.func if isinstance(node, ast.Call) else node
    owner, _, name = ast.unparse(called).removeprefix("sparkdl.").rpartition(".")
    if owner:
        documented = inspect.getdoc(PUBLIC.get(owner)) or ""
        return hasattr(PUBLIC.get(owner), name) or f"{name}:" in documented
    given = {each.arg for each in node.keywords} if isinstance(node, ast.Call) else set()
    return name in KNOWN and given - {None} <= (arguments(PUBLIC[name]) if given else set())


def test_ours_exists() -> None:
    rows = [re.split(r" ?\| ?", line) for line in PAGE.splitlines() if line.startswith("| ")]
    ours = [name for row in rows for name in re.findall(r"`([^`]+)`", row[2])]
    programs = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    calls = [node for each in programs for node in ast.walk(ast.parse(each))]
    ours += [
        ast.unparse(n) for n in calls if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
    ]
    assert len(ours) > 80
    assert [name for name in ours if not exists(name)] == []
    assert not exists("TorchModel.getHistory")
    assert not exists("GradientAllReduce(compress=True)")


def test_the_defaults_that_are_given_are_so() -> None:
    ours = sparkdl.ParameterAveraging()
    assert (ours.period, ours.average_optimizer_state) == (5, True)
    assert inspect.signature(sparkdl.TorchEstimator.__init__).parameters["batchSize"].default == 32
    assert sparkdl.AsynchronousSGD().barrier == sparkdl.strategies.ASP()
    shared = sparkdl.ThresholdGradientSharing()
    assert (shared.threshold, shared.sparsity, shared.clip) == (1e-3, (1e-4, 1e-2), 5)
