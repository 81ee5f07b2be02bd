"""What the tests of bad input share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from frames import Refuse, estimator
from models import Traced, lines
from pyspark.sql import DataFrame


@pytest.fixture
def refuse(tmp_path: Path) -> Refuse:
    """Fit, expect the error with every fragment in its message, and that no worker took a step."""
    trace = tmp_path / "passes"

    def fit(rows: DataFrame, error: type[Exception], *fragments: str, **changes: Any) -> str:
        changes = {"model": Traced(str(trace)), **changes}
        with pytest.raises(error) as caught:
            estimator(**changes).fit(rows)
        message = str(caught.value)
        for fragment in fragments:
            assert fragment in message
        processes = {int(line.split()[0]) for line in lines(trace)}
        assert processes <= {os.getpid()}
        return message

    return fit
