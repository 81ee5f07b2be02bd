"""A Spark that lacks private names, which another version may have under others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from py4j.java_gateway import JavaObject
from py4j.protocol import Py4JError


@contextmanager
def lacking(*names: str) -> Iterator[None]:
    """Meanwhile, objects of the JVM have no methods of these names."""
    found = JavaObject.__getattr__

    def found_unless_missing(self: Any, name: str) -> Any:
        if name in names:
            raise Py4JError(f"{name} does not exist in the JVM")
        return found(self, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JavaObject, "__getattr__", found_unless_missing)
        yield
