"""what_happens.md says of each model, optimizer and schedule what happens, and this is what does.

``make models-table`` writes its tables again; docs/models.md has the rows that a user needs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from models import lines
from pyspark.sql import DataFrame, SparkSession
from table_case import Case, estimate, require_predicted, require_trained, table_rows
from table_models import MODELS
from table_optimizers import OPTIMIZERS, SCHEDULERS

from sparkdl.errors import ConfigError, DataError, ModelError

PAGE = Path(__file__).parent / "what_happens.md"
GUIDE = Path(__file__).parents[2] / "docs" / "models.md"
TABLES = {"model": MODELS, "optimizer": OPTIMIZERS, "schedule": SCHEDULERS}
CASES = [case for table in TABLES.values() for case in table]
REWRITES = os.environ.get("REWRITE_MODELS_TABLE") == "1"


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> Iterator[DataFrame]:
    rows = table_rows(spark)
    yield rows
    rows.unpersist()


def _named(page: Path) -> dict[str, str]:
    """What the tables of a page say of each case that they name."""
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", page.read_text(), re.MULTILINE)
    return {name: happens for names, happens in rows for name in names.split("; ")}


def _written() -> dict[str, str]:
    """What the page says of each case; what it does not name works as it is."""
    named = _named(PAGE)
    return {case.name: named.get(case.name, "works") for case in CASES}


@pytest.fixture(scope="module")
def said() -> Iterator[dict[str, str]]:
    """What the page says; what a test puts there is what it will say, if it is to be rewritten."""
    said = _written()
    yield said
    if REWRITES:
        introduction = PAGE.read_text().split("\n| ")[0].rstrip()
        PAGE.write_text("\n\n".join([introduction, *_tables(said)]) + "\n")


def _tables(said: dict[str, str]) -> Iterator[str]:
    others = re.findall(r"^\| everything else .*$", PAGE.read_text(), re.MULTILINE)
    for (heading, cases), last in zip(TABLES.items(), others, strict=True):
        names: dict[str, list[str]] = {}
        for case in cases:
            names.setdefault(said[case.name], []).append(case.name)
        names.pop("works", None)
        rows = [f"| {'; '.join(each)} | {happens} |" for happens, each in names.items()]
        yield "\n".join([f"| {heading} | what happens |", "|---|---|", *rows, last])


def what_happens(case: Case, rows: DataFrame, trace: Path) -> str:
    try:
        fitted = estimate(case, str(trace)).fit(rows)
    except (ConfigError, DataError, ModelError) as refusal:
        assert not lines(trace), "workers have trained before this refusal"
        return f"refused: {' '.join(str(refusal).split())}".replace("|", "\\|")
    assert lines(trace)
    require_trained(case, fitted)
    if case in MODELS:
        require_predicted(case, fitted, rows)
    return f"works: {case.how}" if case.how else "works"


def says(written: str, happened: str) -> bool:
    """Whether the page has what happened, in which its … may stand for a part of the message."""
    return re.fullmatch(".+".join(map(re.escape, written.split("…"))), happened) is not None


def test_what_the_page_leaves_out_is_no_more_than_that() -> None:
    assert says("works", "works")
    assert not says("", "works")
    assert says("refused: it fails …. Give a function", "refused: it fails here. Give a function")
    assert not says("refused: it fails …. Give a function", "refused: it fails here.")


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_what_the_page_says_happens(
    case: Case, rows: DataFrame, said: dict[str, str], tmp_path: Path
) -> None:
    happened = what_happens(case, rows, tmp_path / "batches")
    if REWRITES and not says(said[case.name], happened):
        said[case.name] = happened
    assert says(said[case.name], happened)


def test_the_pages_name_no_case_that_is_not_tried() -> None:
    names = {name for name, happens in _named(PAGE).items() if happens != "works"}
    assert names - {*TABLES, *(case.name for case in CASES)} == set()
    assert _named(GUIDE).items() <= _named(PAGE).items()


def test_the_page_is_as_it_would_be_written() -> None:
    assert PAGE.read_text().rstrip().endswith("\n\n".join(_tables(_written())))
