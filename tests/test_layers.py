"""Imports point down the list of layers, and pyspark stops at the layer named spark."""

from __future__ import annotations

import ast
import configparser
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import sparkdl

ROOT = Path(sparkdl.__file__).parent

# From top to bottom; layers of one row stand side by side and do not import each other.
LAYERS: list[tuple[str, ...]] = [
    ("dedup", "jobs"),
    ("estimator",),
    ("volumes",),
    ("spark",),
    ("driver",),
    ("callbacks",),
    ("report",),
    ("parallel", "planner"),
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
    ("protocols", "untrusted"),
    ("encodings", "events", "phases"),
    ("durable", "process", "user_code"),
    ("arguments",),
    ("errors", "redaction"),
    ("version",),
]
# The rooms of a layer, and the modules beside them, from top to bottom as well.
ROOMS: dict[str, list[tuple[str, ...]]] = {
    "jobs": [
        ("__main__",),
        ("plan", "predict", "train"),
        ("evaluate",),
        ("command",),
        ("grammar",),
        ("values",),
        ("logs", "output", "result", "sources"),
    ],
    "spark": [
        ("functions", "inference"),
        ("launch",),
        ("diagnostics", "required", "shipping"),
        ("arrival",),
        ("cluster", "files", "pickling", "rows", "sending", "session"),
        ("catalyst",),
    ],
    "strategies": [
        (
            "all_reduce",
            "asynchronous_sgd",
            "elastic_averaging",
            "gossip_averaging",
            "outer_optimizer",
            "threshold_gradient_sharing",
        ),
        (
            "asynchronous_barriers",
            "elastic_springs",
            "gossip_lockstep",
            "outer_streaming",
            "parameter_averaging",
        ),
        ("gossip_values", "worker_group"),
        ("base",),
        ("arguments",),
    ],
    "volumes": [
        ("run",),
        ("task",),
        ("network", "records"),
        ("store",),
        ("chunk",),
        ("blend",),
        ("grid",),
    ],
    "feed": [
        ("feed",),
        ("minibatches", "reading"),
        ("order", "partition_store", "shards"),
        ("column_statistics", "stored_rows"),
        ("decode", "fingerprint"),
        ("packed",),
        ("conversion", "schema"),
    ],
    "parallel": [("model",), ("cube",)],
    "averager": [
        ("client", "service"),
        ("coordination", "time_reports"),
        ("cutoff",),
        ("headers", "round_policy"),
        ("run_events", "values"),
    ],
}
IN_SPARK = ROOT / "volumes" / "run.py"
"""The one module of its room that knows Spark."""
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


@cache
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


def roots_imported_by(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports_of(path)}


def rooms_imported_by(path: Path) -> set[str]:
    """Of its own layer."""
    layer = f"sparkdl.{layer_of(path)}."
    return {name.split(".")[2] for name in imports_of(path) if name.startswith(layer)}


def imports_up(path: Path) -> list[str]:
    """What a module imports of other layers that are not below its own."""
    layer = layer_of(path)
    if layer not in {*HEIGHT, "testing"}:
        return []  # the public face sees everything and is imported by nobody inside
    below = HEIGHT["spark"] if layer == "testing" else HEIGHT[layer]
    return [
        f"{path.relative_to(ROOT)} imports sparkdl.{imported}"
        for imported in sorted(sparkdl_layers_of(path) - {layer})
        if HEIGHT.get(imported, below) >= below
    ]


def imports_up_within_its_layer(path: Path) -> list[str]:
    layer, room = layer_of(path), room_of(path)
    floor = FLOOR[layer]
    if room not in floor:
        return []  # the layer's face, imported by nobody inside it
    return [
        f"{path.relative_to(ROOT)} imports sparkdl.{layer}.{imported}"
        for imported in sorted(rooms_imported_by(path) - {room})
        if floor.get(imported, floor[room]) >= floor[room]
    ]


def names(paths: Iterable[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def require_none(found: Iterable[str]) -> None:
    lines = list(found)
    assert not lines, "\n" + "\n".join(lines)


def test_every_module_belongs_to_a_layer_and_to_a_room_of_it() -> None:
    layers = {*HEIGHT, "testing", "__init__"}
    rooms = {layer: {*floor, "__init__"} for layer, floor in FLOOR.items()}
    lost = [path for path in MODULES if layer_of(path) not in layers]
    lost += [path for path in MODULES_IN_ROOMS if room_of(path) not in rooms[layer_of(path)]]
    require_none(names(lost))


def test_imports_point_down() -> None:
    assert len(MODULES) > 200
    require_none(line for path in MODULES for line in imports_up(path))


def test_imports_between_the_rooms_of_a_layer_point_down() -> None:
    assert len(MODULES_IN_ROOMS) > 100
    require_none(line for path in MODULES_IN_ROOMS for line in imports_up_within_its_layer(path))


def test_pyspark_stops_at_the_spark_layer() -> None:
    may = ("spark", "estimator", "dedup", "jobs", "__init__")
    below = [path for path in MODULES if layer_of(path) not in may and path != IN_SPARK]
    require_none(names(path for path in below if roots_imported_by(path) & {"pyspark", "py4j"}))


def test_nobody_imports_the_testing_package_or_the_tests() -> None:
    others = [path for path in MODULES if layer_of(path) != "testing"]
    require_none(names(path for path in others if "testing" in sparkdl_layers_of(path)))
    tests = {"tests", "jobs", "benchmarks", "pytest", "hypothesis"}
    require_none(names(path for path in MODULES if roots_imported_by(path) & tests))


def test_the_package_of_an_extra_is_imported_by_the_room_that_has_it_only() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT.parent / "setup.cfg")
    of_extras = {
        "PIL": ("pillow", {"encodings"}, ("images", "dedup")),
        "imagehash": ("imagehash", {"dedup"}, ("dedup",)),
        "scipy": ("scipy", {"planner"}, ("planning",)),
        "tensorstore": ("tensorstore", {"volumes"}, ("volumes",)),
    }
    for root, (distribution, layers, extras) in of_extras.items():
        assert {layer_of(path) for path in MODULES if root in roots_imported_by(path)} == layers
        for extra in extras:
            assert f"{distribution}>=" in setup["options.extras_require"][extra], extra
