"""Nothing that is printed or logged as it is shows a job's secret."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from typing import Any

import sparkdl
from sparkdl.spark.launch.rank_host import RankCall

SECRETS = ("token", "secret", "password")


def dataclasses_of_sparkdl() -> set[type[Any]]:
    found = set()
    for module in pkgutil.walk_packages(sparkdl.__path__, "sparkdl."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, type) and dataclasses.is_dataclass(value):
                found.add(value)
    return found


def test_no_dataclass_shows_a_secret_in_its_repr() -> None:
    secret = {
        (kind.__qualname__, field.name): field.repr
        for kind in dataclasses_of_sparkdl()
        for field in dataclasses.fields(kind)
        if field.name in SECRETS
    }
    assert {"ServiceAddress"} <= {name for name, _ in secret}
    assert [name for name, shown in secret.items() if shown] == []


def test_a_call_for_a_process_of_its_own_does_not_show_what_it_hands_over() -> None:
    call = RankCall(rank=1, entry="module:function", arguments=(("host", 1, "a secret"),))
    assert "a secret" not in repr(call)
