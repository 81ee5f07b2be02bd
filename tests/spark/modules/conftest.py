"""A folder of the user's own, and executors that do not see it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from projects import on_path

from sparkdl.spark.modules import shipping


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """A folder in which only the driver looks for modules."""
    folder = tmp_path / "project"
    folder.mkdir()
    with on_path(folder):
        yield folder


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors are on other hosts, which do not have the driver's folders."""
    shipped = shipping.Shipped

    def on_another_host(name: str, relative: str, base: str | None) -> shipping.Shipped:
        return shipped(name, relative, f"/nowhere{base}")

    monkeypatch.setattr(shipping, "Shipped", on_another_host)
