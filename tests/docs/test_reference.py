"""Every public name and every error is in the reference; Sphinx says so if one is not there."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

from sparkdl import errors

FOLDER = Path(__file__).parents[2] / "docs/reference"
PUBLIC = ("sparkdl", "sparkdl.callbacks", "sparkdl.jobs", "sparkdl.strategies", "sparkdl.testing")


def test_every_public_name_and_every_error_is_in_the_reference() -> None:
    names = {name for each in PUBLIC for name in importlib.import_module(each).__all__}
    names |= {
        name
        for name, each in inspect.getmembers(errors, inspect.isclass)
        if issubclass(each, errors.SparkDLError) and name[0] != "_"
    }
    pages = "\n".join(page.read_text() for page in FOLDER.glob("*.rst"))
    documented = re.findall(r"^\.\. auto[a-z]+:: (?:[\w.]+\.)?(\w+)$", pages, re.MULTILINE)
    assert names - {"__version__"} - set(documented) == set()
