"""The layers and groups that a plan names for ``Hybrid`` are those that send and take least."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from every_row import every
from torch import nn

from sparkdl.planner.balance import TRIED, Layer, by_data, exchange, fastest_split, step
from sparkdl.planner.layers import layer_balance
from sparkdl.planner.links import Link
from sparkdl.strategies import Hybrid
from sparkdl.strategies.all_reduce.hybrid import sent_bytes
from sparkdl.strategies.worker_group import Grid

PAGE = Path(__file__).parents[2] / "docs" / "notes" / "strategies.md"
FLOP_S = 5e12
"""Of the workers of the page's table."""


def linear(name: str, inputs: int, outputs: int, positions: int = 1) -> Layer:
    """A layer with a bias, for each of a row's positions."""
    weights = 2 * positions * inputs * outputs
    sizes = 4 * (inputs + 1) * outputs, 4 * positions * inputs
    return Layer(name, "Linear", 3 * weights, 2 * weights, *sizes, True, 4 * positions * outputs)


def convolution(inputs: int, outputs: int, kernel: int, width: int, input_width: int) -> Layer:
    weights = inputs * outputs * kernel**2
    flop = 2 * weights * width**2
    name = f"convolution {inputs}-{outputs}"
    size = 4 * inputs * input_width**2
    return Layer(name, "Conv2d", 3 * flop, 2 * flop, 4 * weights, size, False)


def full(inputs: int, outputs: int) -> Layer:
    weights = inputs * outputs
    name = f"full {inputs}-{outputs}"
    return Layer(name, "Linear", 6 * weights, 4 * weights, 4 * weights, 4 * inputs, True)


ALEXNET = [
    convolution(3, 64, 11, 55, 224),
    convolution(64, 192, 5, 27, 27),
    convolution(192, 384, 3, 13, 13),
    convolution(384, 256, 3, 13, 13),
    convolution(256, 256, 3, 13, 13),
    linear("classifier.1", 9216, 4096),
    linear("classifier.4", 4096, 4096),
    linear("classifier.6", 4096, 1000),
]
TRANSFORMER = [
    linear(f"layers.{block}.{name}", *sizes, 128)
    for block in range(6)
    for name, *sizes in (
        ("attention.inputs", 512, 1536),
        ("attention.outputs", 512, 512),
        ("linear1", 512, 2048),
        ("linear2", 2048, 512),
    )
]
CASES = [
    (name, layers, 32, workers, link)
    for name, layers in (("AlexNet", ALEXNET), ("transformer", TRANSFORMER))
    for workers, link in ((4, "1 Gbit/s"), (16, "10 Gbit/s"), (64, "10 Gbit/s"))
]


def lines() -> list[str]:
    """The rows of the page's table."""
    found = []
    for name, layers, rows, workers, link in CASES:
        compute_s = sum(each.flop for each in layers) * rows / FLOP_S
        wire = Link.parse(link)
        split, least = fastest_split(layers, rows, workers, compute_s, wire)
        plain = step(layers, by_data(layers, rows * workers, workers), workers, compute_s, wire)
        setting = "`GradientAllReduce()`"
        if split is not None:
            setting = f"`hybrid=Hybrid({split.layers!r}, groups={split.groups})`"
        took = f"{compute_s * 1e3:.0f} | {plain.seconds * 1e3:,.0f} | {least.seconds * 1e3:,.0f}"
        found.append(f"| {name} | {workers} | {link} | {took} | {setting} |")
    return found


def test_the_page_has_the_table() -> None:
    found = "\n".join(lines())
    assert found in PAGE.read_text(), found


@every("groups", [1, 2, 4, 8])
def test_a_split_layer_sends_what_the_strategy_counts(groups: int) -> None:
    layer, rows = nn.Linear(96, 40), 6
    found = exchange(linear("layer", 96, 40), rows * 8, 8, groups)
    assert found.data + found.model == pytest.approx(sent_bytes(layer, rows, Grid(8, 8 // groups)))


def test_the_fastest_split_of_one_layer_is_that_of_bytes_where_nothing_is_hidden() -> None:
    """One layer has nothing to hide behind: a step is its bytes, and computing."""
    for inputs, outputs, rows in ((512, 512, 4), (64, 4096, 16), (4096, 64, 2), (32, 32, 64)):
        layer = nn.Linear(inputs, outputs)
        split, taken = fastest_split([linear("0", inputs, outputs)], rows, 12, 1e-9, Link(1e6))
        fewest = Hybrid("0").grid([layer], rows, 12)
        assert (12 if split is None else split.groups) == 12 // fewest.width
        if split is not None:
            assert taken.seconds == pytest.approx(1e-9 + sent_bytes(layer, rows, fewest) / 1e6)


def test_only_layers_that_can_be_split_are_named_by_a_pattern_that_names_no_others() -> None:
    tied = replace(linear("classifier.5", 4096, 4096), splits=False)
    for layers, pattern in (
        (ALEXNET, "classifier.*"),
        ([linear("head.linear", 8, 8), *ALEXNET, linear("words.linear", 8, 8)], "classifier.*"),
        ([*ALEXNET[:5], tied], None),
        ([full(9216, 4096)], "full 9216-4096"),
    ):
        split, _ = fastest_split(layers, 32, 8, 0.01, Link.parse("1 Gbit/s, 1 ms"))
        assert (split and split.layers) == pattern


def test_of_many_layers_only_the_patterns_that_are_tried_are_matched_with_all_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    matched, match = [], fnmatch.fnmatchcase

    def counted(name: str, pattern: str) -> bool:
        matched.append(pattern)
        return match(name, pattern)

    def filtered(names: Iterable[str], pattern: str) -> list[str]:
        return [name for name in names if counted(name, pattern)]

    monkeypatch.setattr(fnmatch, "fnmatchcase", counted)
    monkeypatch.setattr(fnmatch, "filter", filtered)
    layers = [linear(f"blocks.{index}.experts", 64, 64) for index in range(2 * TRIED)]
    split, _ = fastest_split(layers, 1, 2, 1e-9, Link(1e6))
    assert split is not None
    assert split.layers == "blocks.*"
    assert len(matched) == TRIED * len(layers)


def test_a_balance_names_the_setting_in_words_and_counts_what_a_layer_hands_on() -> None:
    model = nn.Sequential(nn.Linear(4, 2048), nn.ReLU(), nn.Linear(2048, 2048))
    given = {"batch_size": 4, "workers": 4, "link": "1 Gbit/s", "step_s": 0.001}
    found = layer_balance(model, torch.randn(2, 4), **given)
    assert [each.output_bytes for each in found.layers] == [4 * 2048] * 2
    assert found.split is not None
    assert f"With hybrid={found.split} it takes" in found.explain()
    alone = replace(found, workers=1)
    assert alone.split is None
    assert "hybrid" not in alone.explain()
    assert math.isclose(alone.step().seconds, 0.001)
