"""That every script starts, what its last line has, and what ``run.py`` makes of that."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from every_row import every_row
from subprocesses import printed_by

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

from run import compare, write

FOLDER = Path(__file__).parent.parent / "benchmarks"
IN_ONE_PROCESS = """
import contextlib, importlib, io, runpy, sys, traceback

sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    sys.argv, said = [name, "--help"], io.StringIO()
    try:
        # Of a module that is no script nothing runs but its definitions.
        with contextlib.redirect_stdout(said):
            runpy.run_path(name, run_name="__main__")
        problem = "" if "__main__" not in open(name).read() else "does not know --help"
    except SystemExit as end:
        problem = f"ends with {end.code}" if end.code or "usage:" not in said.getvalue() else ""
    except Exception:
        problem = traceback.format_exc()
    if problem:
        print(f"{name}: {problem}")
"""
"""torch and Spark are imported once for all of them: a process each would take three minutes."""


@pytest.mark.gate
def test_every_script_starts_and_has_a_help() -> None:
    scripts = sorted(map(str, FOLDER.glob("*.py")))
    assert len(scripts) > 20
    assert printed_by("-c", IN_ONE_PROCESS, FOLDER, *scripts, timeout=170) == ""


def run(**ratios: float) -> dict[str, Any]:
    """Claims of a run; of those named ``speed`` more is better."""
    bounds = {True: "at least", False: "at most"}
    return {
        name: {"name": name, "ratio": ratio, "bound": bounds[name == "speed"]}
        for name, ratio in ratios.items()
    }


@every_row(
    # A longer time and a lower speed.
    ([run(time=2.2, speed=2.0)], [run(time=2.0, speed=2.2)], [1.1, 1.1]),
    # The median of the turns counts.
    ([run(time=1.0), run(time=9.0), run(time=1.02)], [run(time=1.0)] * 3, [1.02]),
    # Nothing in both, and something beside nothing.
    ([run(threads=0.0, memory=1.0)], [run(threads=0.0, memory=0.0)], [1.0, float("inf")]),
    # What only one of them claims is left out.
    ([run(time=1.0, memory=3.0)], [run(time=1.0, speed=3.0)], [1.0]),
)
def test_each_claim_that_both_make_is_so_many_times_worse_here(
    here: list[Any], there: list[Any], worse: list[float]
) -> None:
    claims = compare(here, there)
    assert [claim.ratio for claim in claims] == pytest.approx(worse)
    assert [claim.met for claim in claims] == [each <= 1.05 for each in worse]


def test_two_without_a_claim_in_common_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no claim in common: here \['time'\]"):
        compare([run(time=1.0)], [run(speed=3.0)])


def test_a_table_takes_the_place_of_what_stood_between_its_marks(tmp_path: Path) -> None:
    marked, other = tmp_path / "marked.md", tmp_path / "other.md"
    marked.write_text("a\n<!-- benchmark feed -->\nold\n<!-- end -->\nb\n<!-- end -->\n")
    other.write_text("<!-- benchmark feed epochs -->\nold\n<!-- end -->\n")
    assert write("feed", "| new |", [marked, other]) == ["marked.md"]
    expected = "a\n<!-- benchmark feed -->\n| new |\n<!-- end -->\nb\n<!-- end -->\n"
    assert marked.read_text() == expected
    assert "old" in other.read_text()
