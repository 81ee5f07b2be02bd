"""The public names are one list, which leads to what there is and is what the reference has."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
from pathlib import Path

import pytest
from subprocesses import printed_by

import sparkdl

ROOT = Path(__file__).parents[1]
LIST = ast.parse((ROOT / "sparkdl" / "__init__.pyi").read_text()).body[1:]


def listed() -> dict[str, str]:
    """The home of each name, by Python's own parser."""
    homes = {}
    for node in LIST:
        assert isinstance(node, ast.ImportFrom)
        assert node.module is not None
        (alias,) = node.names
        assert alias.name == alias.asname
        homes[alias.name] = node.module
    return homes


def test_all_has_the_names_of_the_list() -> None:
    assert sparkdl.__all__ == sorted(listed()) == dir(sparkdl)
    assert "TorchEstimator" in sparkdl.__all__


def test_a_name_is_what_its_home_has() -> None:
    for name, home in listed().items():
        assert getattr(sparkdl, name) is getattr(importlib.import_module(home), name), name


def test_no_name_of_the_list_needs_a_package_of_an_extra() -> None:
    extras = ["PIL", "cryptography", "imagehash", "matplotlib", "mlflow", "scipy", "tensorboard"]
    extras += ["tensorstore", "torchmetrics", "yaml"]
    program = f"import sys, sparkdl; sys.modules.update(dict.fromkeys({extras})); "
    program += "print(*(getattr(sparkdl, name) for name in sparkdl.__all__), sep='\\n')"
    assert len(printed_by("-c", program).splitlines()) >= len(sparkdl.__all__)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'sparkdl' has no attribute 'TorchEstimater'"):
        sparkdl.TorchEstimater  # type: ignore[attr-defined]  # noqa: B018


def test_the_reference_has_every_name() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.rst"))
    documented = re.findall(r"^\.\. auto(?:class|function):: (?:sparkdl\.)?(\w+)$", pages, re.M)
    assert set(listed()) - set(documented) == {"__version__"}


def test_the_list_is_found_in_a_package_that_is_zipped(tmp_path: Path) -> None:
    for name in ("__init__.py", "__init__.pyi", "version.py"):
        (tmp_path / "sparkdl").mkdir(exist_ok=True)
        shutil.copy(ROOT / "sparkdl" / name, tmp_path / "sparkdl" / name)
    zipped = shutil.make_archive(str(tmp_path / "package"), "zip", tmp_path, "sparkdl")
    program = (
        f"import sys; sys.path.insert(0, {zipped!r}); import sparkdl; print(sparkdl.__file__, "
    )
    program += "sparkdl.__version__, len(sparkdl.__all__))"
    printed = printed_by("-c", program)
    assert printed.split() == [
        f"{zipped}/sparkdl/__init__.py",
        sparkdl.__version__,
        str(len(listed())),
    ]
