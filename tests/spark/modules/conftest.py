"""A folder of the user's own, and executors that do not see it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    shipment = shipping.Shipment

    def on_another_host(**given: Any) -> shipping.Shipment:
        units = tuple((name, f"/nowhere{base}") for name, base in given.pop("units"))
        return shipment(units=units, **given)

    monkeypatch.setattr(shipping, "Shipment", on_another_host)
