"""A Python process loads a model once, and keeps one at a time."""

from __future__ import annotations

from subprocesses import printed_by

FOUR_TASKS = """
import gc
from types import SimpleNamespace
from torch import nn
from sparkdl.checkpoint.portable import pickled_module
from sparkdl.process.torch_settings import TorchSettings
from sparkdl.spark.inference.shared_model import SharedModel, loaded

for key in "aabb":
    pickled = SimpleNamespace(value=pickled_module(nn.Linear(1, 1), None))
    shared = SharedModel(key, pickled, None)
    with loaded(shared, "cpu", None, TorchSettings.here(), compiled=False):
        print(gc.get_freeze_count())
"""


def test_collections_spare_a_model_until_another_one_comes() -> None:
    spared = [int(line) for line in printed_by("-c", FOUR_TASKS).split()]
    assert spared[0] == spared[2] == 0
    assert min(spared[1], spared[3]) > 100_000  # torch alone has as many objects
