"""Imports point down the list of layers, and pyspark stops at the layer named spark."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import sparkdl

ROOT = Path(sparkdl.__file__).parent

# From top to bottom; layers of one row stand side by side and do not import each other.
LAYERS: list[tuple[str, ...]] = [
    ("jobs",),
    ("estimator",),
    ("spark",),
    ("driver",),
    ("callbacks",),
    ("report",),
    ("worker",),
    ("reshuffle",),
    ("strategies",),
    ("averager", "worker_callback"),
    ("collective",),
    ("replica",),
    ("transport", "large_batches"),
    ("feed",),
    ("checkpoint", "metrics"),
    ("outputs",),
    ("protocols",),
    ("encodings", "events", "hooks", "phases"),
    ("durable", "process", "user_code"),
    ("arguments",),
    ("errors", "redaction"),
    ("version",),
]
# The rooms of a layer, and the modules beside them, from top to bottom as well.
ROOMS: dict[str, list[tuple[str, ...]]] = {
    "jobs": [
        ("evaluate", "predict", "train"),
        ("command",),
        ("configuration", "metrics", "models"),
        ("logs", "results", "sources"),
        ("exits",),
    ],
    "spark": [
        ("functions", "inference"),
        ("launch",),
        ("diagnostics", "modules"),
        ("closures", "cluster", "rows", "session", "storage"),
    ],
    "strategies": [
        ("all_reduce", "asynchronous", "elastic", "gossip", "outer", "threshold"),
        ("compression", "kfac", "parameter_averaging"),
        ("cutoff", "inner_momentum", "on_worker", "steps_ahead", "worker_group"),
        ("base",),
    ],
    "feed": [
        ("feed",),
        ("arrival",),
        ("reading",),
        ("minibatches", "statistics", "store"),
        ("record_batches",),
        ("columns",),
    ],
    "averager": [
        ("client", "service"),
        ("coordination",),
        ("policies",),
        ("messages", "values"),
    ],
}
HEIGHT = {name: -row for row, names in enumerate(LAYERS) for name in names}
FLOOR = {
    layer: {name: -row for row, names in enumerate(rooms) for name in names}
    for layer, rooms in ROOMS.items()
}
MODULES = sorted(ROOT.rglob("*.py"))
MODULES_IN_ROOMS = sorted(path for layer in ROOMS for path in (ROOT / layer).rglob("*.py"))


def layer_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    """Full names of everything imported, anywhere in the file and also inside functions."""
    package = ("sparkdl", *path.relative_to(ROOT).parts[:-1])
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            # "from sparkdl import errors" imports sparkdl.errors
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def sparkdl_layers_of(path: Path) -> set[str]:
    return {
        name.split(".")[1]
        for name in imports_of(path)
        if name.startswith("sparkdl.") and not name.startswith("sparkdl.__")
    }


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[1].removesuffix(".py")


def rooms_imported_by(path: Path) -> set[str]:
    """Of its own layer."""
    layer = f"sparkdl.{layer_of(path)}."
    return {name.split(".")[2] for name in imports_of(path) if name.startswith(layer)}


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_every_module_belongs_to_a_layer(path: Path) -> None:
    assert layer_of(path) in {*HEIGHT, "testing", "__init__"}


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_imports_point_down(path: Path) -> None:
    layer = layer_of(path)
    if layer == "__init__":
        return  # the public face sees everything and is imported by nobody inside
    below = HEIGHT["spark"] if layer == "testing" else HEIGHT[layer]
    for imported in sparkdl_layers_of(path) - {layer}:
        assert imported in HEIGHT, f"{path} imports sparkdl.{imported}"
        assert HEIGHT[imported] < below, f"{path} imports sparkdl.{imported}, which is not below"


@pytest.mark.parametrize("path", MODULES_IN_ROOMS, ids=ids)
def test_every_module_of_a_layer_with_rooms_belongs_to_one(path: Path) -> None:
    assert room_of(path) in {*FLOOR[layer_of(path)], "__init__"}


@pytest.mark.parametrize("path", MODULES_IN_ROOMS, ids=ids)
def test_imports_between_the_rooms_of_a_layer_point_down(path: Path) -> None:
    layer, room = layer_of(path), room_of(path)
    if room == "__init__":
        return  # the layer's face, imported by nobody inside it
    floor = FLOOR[layer]
    for imported in rooms_imported_by(path) - {room}:
        assert imported in floor, f"{path} imports sparkdl.{layer}.{imported}"
        assert floor[imported] < floor[room], (
            f"{path} imports sparkdl.{layer}.{imported}, which is not below"
        )


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_pyspark_stops_at_the_spark_layer(path: Path) -> None:
    if layer_of(path) in ("spark", "estimator", "jobs", "__init__"):
        return
    roots = {name.split(".")[0] for name in imports_of(path)}
    assert not roots & {"pyspark", "py4j"}


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_nobody_imports_the_testing_package_or_the_tests(path: Path) -> None:
    if layer_of(path) != "testing":
        assert "testing" not in sparkdl_layers_of(path)
    roots = {name.split(".")[0] for name in imports_of(path)}
    assert not roots & {"tests", "jobs", "benchmarks", "pytest", "hypothesis"}


def test_the_reader_of_imports_sees_every_form(tmp_path: Path) -> None:
    """Guards the tests above against a reader that sees nothing."""
    lines = [
        "import sparkdl.worker",
        "from sparkdl import driver",
        "from sparkdl.feed.columns.schema import FeedSchema",
        "from sparkdl.spark import inference",
        "from sparkdl.spark.rows.columns import input_column",
        "def f():",
        "    from pyspark.sql import functions",
    ]
    path = ROOT / "spark" / "imaginary.py"
    source = tmp_path / "imaginary.py"
    source.write_text("\n".join(lines))

    class Elsewhere(type(path)):  # type: ignore[misc]
        def read_text(self, *_: object, **__: object) -> str:
            return source.read_text()

    names = imports_of(Elsewhere(path))
    assert names >= {"sparkdl.worker", "sparkdl.driver", "pyspark.sql.functions"}
    assert sparkdl_layers_of(Elsewhere(path)) == {"worker", "driver", "feed", "spark"}
    assert rooms_imported_by(Elsewhere(path)) == {"inference", "rows"}
