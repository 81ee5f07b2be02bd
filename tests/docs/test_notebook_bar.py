"""In a notebook a fit shows a bar that is a widget, and says how it has ended."""

from __future__ import annotations

import textwrap
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

SETTING = """
    from functools import partial

    import torch
    from pyspark.sql import functions as F
    from torch import nn

    from sparkdl import ParameterAveraging, TorchEstimator, create_session
    from sparkdl.callbacks import Callback

    class StopsAfter(Callback):
        def __init__(self, epoch):
            self.epoch = epoch

        def on_epoch(self, training, summary):
            if summary.epoch == self.epoch:
                training.stop("enough")

    class Fails(Callback):
        def on_epoch(self, training, summary):
            raise ZeroDivisionError("the user's own")

    spark = create_session("bars", master="local[2]")
    rows = spark.range(60).select(
        F.array((F.col("id") % 7) / 7.0, (F.col("id") % 5) / 5.0).alias("features"),
        (F.col("id") % 2).alias("label"),
    )
    estimator = TorchEstimator(
        model=partial(nn.Linear, 2, 2),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        strategy=ParameterAveraging(period=2),
        batchSize=10,
        numWorkers=2,
        epochs=3,
    )
"""
FITS = {
    "whole": "model = estimator.fit(rows)",
    "streamed": """
        from sparkdl.estimator.progress import ProgressBar
        from sparkdl.events import WindowReport
        from sparkdl.feed.statistics.shards import DataStatistics

        def window(examples):
            return WindowReport(
                rank=0, epoch=3, step=1, examples=examples, loss_sum=1.0, last=False
            )

        with ProgressBar(3, visible=True) as bar:
            bar(DataStatistics((10, 10), (), pending=(0, 1)))  # how many come is not known yet
            bar(window(20))
            bar(DataStatistics((30, 30), ()))
            bar(window(160))
    """,
    "stopped": "model = estimator.copy().setCallbacks([StopsAfter(2)]).fit(rows)",
    "failed": """
        try:
            estimator.copy().setCallbacks([Fails()]).fit(rows)
        except Exception as error:
            print("the fit has failed:", type(error).__name__)
    """,
    "refused": """
        try:
            estimator.fit(rows.withColumn("label", F.lit(7)))
        except Exception as error:
            print("the fit was refused:", type(error).__name__)
    """,
}
WIDGET = "application/vnd.jupyter.widget-view+json"
STATE = "application/vnd.jupyter.widget-state+json"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Of each fit the widgets that its cell shows: each the states of text, bar and text."""
    cells = [SETTING, *FITS.values(), "spark.stop()"]
    book = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(textwrap.dedent(cell).strip()) for cell in cells]
    )
    NotebookClient(
        book,
        timeout=300,
        startup_timeout=180,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path_factory.mktemp("notebook"))}},
    ).execute()
    widgets = book.metadata["widgets"][STATE]["state"]
    found = {}
    for name, cell in zip(FITS, book.cells[1:-1], strict=True):
        boxes = [o["data"][WIDGET]["model_id"] for o in cell.outputs if WIDGET in o.get("data", {})]
        found[name] = [parts(widgets, box) for box in boxes if box in widgets]
        texts = [output.get("text", "") for output in cell.outputs]
        assert not any("rows/s" in text or "reading rows" in text for text in texts)
    return found


def parts(widgets: Any, box: str) -> dict[str, Any]:
    children = widgets[box]["state"]["children"]
    left, bar, right = (widgets[child.removeprefix("IPY_MODEL_")]["state"] for child in children)
    return {"left": left["value"], "right": right["value"], "hidden": hidden(widgets, box), **bar}


def hidden(widgets: Any, box: str) -> bool:
    layout = widgets[box]["state"]["layout"].removeprefix("IPY_MODEL_")
    return bool(widgets[layout]["state"].get("visibility") == "hidden")


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("fit", ["whole", "streamed"])
def test_a_fit_shows_one_bar_that_is_full_and_green_at_its_end(
    shown: dict[str, list[dict[str, Any]]], fit: str
) -> None:
    (bar,) = shown[fit]
    assert (bar["value"], bar["max"], bar["bar_style"]) == (180, 180, "success")
    assert "epoch" in bar["left"]
    assert "180/180" in bar["right"]
    assert "rows/s" in bar["right"]
    assert "loss" in bar["right"]


@pytest.mark.slow
def test_one_that_was_stopped_is_not_shown_as_a_failure(
    shown: dict[str, list[dict[str, Any]]],
) -> None:
    (bar,) = shown["stopped"]
    assert (bar["value"], bar["max"], bar["bar_style"]) == (120, 180, "success")


@pytest.mark.slow
def test_one_that_fails_is_red(shown: dict[str, list[dict[str, Any]]]) -> None:
    (bar,) = shown["failed"]
    assert (bar["value"], bar["bar_style"]) == (60, "danger")


@pytest.mark.slow
def test_one_that_is_refused_leaves_no_bar(shown: dict[str, list[dict[str, Any]]]) -> None:
    assert all(bar["hidden"] for bar in shown["refused"])
