"""The notebooks of examples/ run from top to bottom, and what they say of their outputs is so.

``REWRITE_NOTEBOOKS=1 pytest tests/docs/test_notebooks.py`` runs them and stores what they show.
"""

from __future__ import annotations

import copy
import os
import re
import socket
import textwrap
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
REWRITE = "REWRITE_NOTEBOOKS"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
ADDRESS = re.compile(r"\b(?!127\.|0\.0\.0\.0)\d{1,3}(?:\.\d{1,3}){3}\b")
"""Of IPv4, but for those that every machine has."""
CLAIMS = {
    "first_model": """
        assert list(model.summary.history["examples"]) == [4000] * 10
        assert list(model.summary.history["rounds"]) == [13] * 10
        assert shades[20, 20] > 0.95 and shades[0, 0] < 0.05
        assert scores["accuracy"] > 0.95 and scores["auroc"] > 0.98
        assert plain(torch.zeros(1, 2)).argmax() == 1
    """,
    "flights": """
        assert (table["month"] <= 4).sum() == 109_119
        late = by_hour.set_index("new_york_hour")["late"]
        assert late.loc[19:21].min() > 1.5 * late.loc[6:9].max()
        steps = -(-summary.rows // 2 // 128)
        assert (history["rounds"] == -(-steps // 5)).all()
        assert 12 < sent / rounds / summary.model_bytes < 13
        assert min(april["network"], april["logistic regression"]) > 0.65
        assert abs(april["network"] - april["logistic regression"]) < 0.015
        assert (tenths["late"] > tenths["predicted"]).iloc[:-2].all()
        assert tenths["late"].corr(tenths["predicted"]) > 0.8
        assert "<svg" in page and "://" not in page
    """,
    "text_classification": """
        assert {"not", "but"} <= set(vocabulary) and not {"the", "was"} & set(vocabulary)
        assert 0.55 < counting < 0.75
        assert accuracy["accuracy"] > 0.92
        content = [row.prediction[1] for row in by_chance]
        assert content[0] > 0.7 > 0.3 > content[1]
        assert content[2] > 0.7 > 0.3 > content[3]
        assert content[4] > 0.5
    """,
    "images": """
        assert len(files) == 1200 and len(sizes) > 1000
        assert len(set(history["examples"])) == 1 and 900 < history["examples"].iloc[0] < 1000
        assert broken == 2
        assert accuracy["accuracy"] > 0.9
        assert unseen["wrong"].sum() < 24
    """,
    "duplicates": """
        assert removed > 0.95 and 1 - originals / len(large) < 0.02
        assert set(conflicts["other"]) == set(wrong) and conflicts["distance"].max() == 2
        share = trade_off["rows"] / trade_off["rows"][0]
        accuracy = trade_off["accuracy"]
        assert 0.7 < share[1] < 0.8 and 0.15 < share[3] < 0.35
        assert accuracy[1] > accuracy[0] - 0.015 and accuracy[3] > accuracy[0] - 0.05
        assert (fresh < 10_050).sum() < 10 and (fresh >= 10_050).sum() > 30
    """,
    "batch_inference": """
        assert right > 0.9 * 797
        assert np.abs(difference).max() < 1e-4
        assert changed < 10
        streamed = pd.read_parquet("output/stream-predictions")
        assert len(streamed) == streamed["id"].nunique() == 500
    """,
    "choosing_a_strategy": """
        rounds, sent, loss = (table[name] for name in table)
        every, five = "averaging, every step", "averaging, every 5 steps"
        momentum, alone = "every 5 steps, outer momentum", "one process"
        assert list(rounds) == [23, 5, 1, 5, 10, 1, 0]
        assert 4.4 < sent[every] / sent[five] < 5 and sent[momentum] == sent[five]
        assert abs(sent["all-reduce of gradients"] / sent[every] - 1) < 0.05
        for name in ("all-reduce of gradients", five, "averaging, once an epoch", alone):
            assert abs(loss[name] / loss[every] - 1) < 0.03
        assert loss[momentum] < 0.85 * loss[five]
    """,
}
"""What the text of each says of its results, as statements that run behind its last cell."""

NAMES = [
    pytest.param("first_model", marks=pytest.mark.nightly),
    *(pytest.param(name, marks=pytest.mark.nightly) for name in CLAIMS if name != "first_model"),
]


def notebook(name: str) -> Any:
    return nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)


def code_cells(book: Any) -> list[Any]:
    return [cell for cell in book.cells if cell.cell_type == "code"]


def run(book: Any, claims: str, folder: Path) -> Any:
    """Run a copy in a kernel of its own, and the claims in the same; return it with its outputs."""
    book = copy.deepcopy(book)
    statements = textwrap.dedent(claims).strip()
    book.cells.append(nbformat.v4.new_code_cell(statements))
    NotebookClient(
        book,
        timeout=600,
        startup_timeout=180,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    ).execute()
    book.cells.pop()
    return book


WIDGET = "application/vnd.jupyter.widget-view+json"


def tidied(book: Any) -> Any:
    """Without what is of one execution and no reader's business: logs, names of hosts, versions.

    Nor bars, which are nothing without the kernel that has shown them.
    """
    book = copy.deepcopy(book)
    book.metadata = nbformat.from_dict(METADATA)
    for cell in book.cells:
        cell.metadata = nbformat.from_dict({})
    for cell in code_cells(book):
        cell.outputs = [
            each
            for each in cell.outputs
            if each.get("name") != "stderr" and WIDGET not in each.get("data", {})
        ]
        for output in cell.outputs:
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})
            if "text" in output:
                output.text = without_hosts(output.text)
            for kind, value in output.get("data", {}).items():
                if kind.startswith("text/"):
                    output.data[kind] = without_hosts(value)
    return book


def without_hosts(text: str) -> str:
    """Also without where in memory an object was."""
    named = re.sub(rf"\b{socket.gethostname()}\b", "localhost", text)
    return re.sub(r" at 0x[0-9a-f]+", "", ADDRESS.sub("localhost", named))


def logged(book: Any) -> str:
    """What it has written to stderr, which is not stored."""
    outputs = (output for cell in code_cells(book) for output in cell.outputs)
    return "\n".join(output.text for output in outputs if output.get("name") == "stderr")


def shown(book: Any) -> str:
    """All text that its outputs have, whatever its kind."""
    texts = []
    for output in (output for cell in code_cells(book) for output in cell.outputs):
        texts.append(output.get("text", ""))
        texts += [v for kind, v in output.get("data", {}).items() if kind.startswith("text/")]
    return "\n".join(texts)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_it_runs_and_its_text_is_true(name: str, tmp_path: Path) -> None:
    ran = run(notebook(name), CLAIMS[name], tmp_path)
    warned = re.findall(r".*Warning: .*", logged(ran))
    assert warned == []  # what a reader would see before anything else
    if os.environ.get(REWRITE):
        nbformat.write(tidied(ran), EXAMPLES / f"{name}.ipynb")


def test_each_is_listed_and_has_claims() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.ipynb")}
    page = (ROOT / "docs/guides.md").read_text()
    assert names == set(CLAIMS)
    assert names == set(re.findall(r"\(\.\./examples/(\w+)\.ipynb\)", page))
    assert names == set(re.findall(r"^examples/(\w+)$", page, re.MULTILINE))


@pytest.mark.parametrize("name", CLAIMS)
def test_it_is_stored_as_it_was_written_anew(name: str) -> None:
    book = notebook(name)
    assert book == tidied(book)  # no logs, hosts, or metadata of an editor
    counts = [cell.execution_count for cell in code_cells(book)]
    assert counts == list(range(1, len(counts) + 1)), f"run it: {REWRITE}=1 pytest {__file__}"
    assert any("image/png" in o.get("data", {}) for c in code_cells(book) for o in c.outputs)
    assert (EXAMPLES / f"{name}.ipynb").stat().st_size < 1_000_000


@pytest.mark.parametrize("name", CLAIMS)
def test_what_is_stored_names_no_place_of_the_machine_that_ran_it(name: str) -> None:
    places = re.findall(r"/(?:home|root|tmp|Users|usr|work|mnt)/\S*", shown(notebook(name)))
    assert places == []


@pytest.mark.parametrize("name", CLAIMS)
def test_its_links_lead_somewhere(name: str) -> None:
    texts = [cell.source for cell in notebook(name).cells if cell.cell_type == "markdown"]
    links = re.findall(r"\]\((?!https?:)([^)#]+)", "\n".join(texts))
    assert links
    for link in links:
        assert (EXAMPLES / link).exists(), link


def test_what_one_execution_leaves_is_noticed() -> None:
    assert without_hosts("rank 0 on 10.1.2.3, 127.0.0.1, Spark 4.3.0") == (
        "rank 0 on localhost, 127.0.0.1, Spark 4.3.0"
    )
    log = nbformat.v4.new_output("stream", name="stderr", text="WARN")
    told = nbformat.v4.new_output("stream", name="stdout", text=f"on {socket.gethostname()}")
    bar = nbformat.v4.new_output(
        "display_data", {WIDGET: {"model_id": "f00"}, "text/plain": "HBox(children=())"}
    )
    cell = nbformat.v4.new_code_cell("1", outputs=[bar, log, told], metadata={"scrolled": True})
    (tidy,) = tidied(nbformat.v4.new_notebook(cells=[cell])).cells
    assert [output.text for output in tidy.outputs] == ["on localhost"]
    assert tidy.metadata == {}
