"""What layers exchange and wait for, and one option for each of them under a memory budget."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import scipy.optimize
import torch
from every_row import every, every_row
from hypothesis import given
from hypothesis import strategies as st
from step_networks import CLASSES, KINDS, Convolutions, Transformer
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from sparkdl import Batch
from sparkdl.errors import ConfigError, ModelError
from sparkdl.planner.balance import (
    Layer,
    LayerBalance,
    best_exchange,
    best_groups,
    bubbles,
    by_data,
    exchange,
    step,
)
from sparkdl.planner.layers import layer_balance
from sparkdl.planner.links import Link
from sparkdl.planner.memory import fastest, rows_of


def full(inputs: int, outputs: int, name: str = "full") -> Layer:
    size = inputs * outputs
    return Layer(name, "Linear", 6 * size, 4 * size, 4 * size, 4 * inputs, True)


def test_the_best_number_of_groups_is_the_papers() -> None:
    """A full layer of 4096 x 4096, 64 nodes, 256 rows: sqrt(N MB / ofm), next to which is best."""
    layer = full(4096, 4096)
    assert best_groups(layer, 256, 64) == pytest.approx(2.0)
    assert best_exchange(layer, 256, 64).groups in (1, 2)
    assert best_groups(Layer("norm", "Norm", 0, 0, 0, 4, False), 256, 64) == math.inf


@given(st.integers(1, 512), st.integers(1, 512), st.integers(1, 512), st.integers(1, 24))
def test_the_best_exchange_is_that_of_trying_all(
    inputs: int, outputs: int, rows: int, workers: int
) -> None:
    """By what the members of a ring send, counted one by one."""
    layer = full(inputs, outputs)

    def sent(groups: int) -> float:
        members = workers // groups
        strip = 4 * inputs * outputs / members
        ring = sum(strip / groups for _ in range(2 * (groups - 1)))  # reduce, then gather
        own = 4 * inputs * rows / workers
        return ring + 2 * own * (members - 1)  # inputs forward, their gradients backward

    divisors = [g for g in range(1, workers + 1) if workers % g == 0]
    best = best_exchange(layer, rows, workers)
    assert best.data + best.model == pytest.approx(min(map(sent, divisors)))
    for g in divisors:
        one = exchange(layer, rows, workers, g)
        assert one.data + one.model == pytest.approx(sent(g))


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=8))
def test_bubbles_sum_to_the_wait_of_a_queue_of_messages(layers: list[tuple[float, float]]) -> None:
    """Layers from the output on: each is computed, then its message waits for the one before it."""
    now = link_free = 0.0
    for sent, computed in reversed(layers):
        now += computed
        link_free = max(link_free, now) + sent
    # The first layer's own backward pass is over before its gradient is there.
    wait = link_free - now
    found = bubbles([sent for sent, _ in layers], [computed for _, computed in layers])
    assert (found >= 0).all()
    assert found.sum() == pytest.approx(wait, abs=1e-9)


def test_a_step_by_hand() -> None:
    """Two layers, 4 workers, 1 MB/s: 3 MB each way in a ring for 2 MB; 6 s computing, 4 backward.

    The upper layer's gradients are sent for 3 s, from when it is done: 2 s before the lower one is.
    So 1 s is left then, and the lower layer's 3 s come after it.
    """
    layers = [Layer(name, "Linear", 3.0, 2.0, 2e6, 0.0, False) for name in ("lower", "upper")]
    found = step(layers, by_data(layers, 1, 4), 4, 6.0, Link(1e6))
    assert found.bubbles_s.tolist() == [3.0, 1.0]
    assert found.seconds == 10.0
    assert found.efficiency == 0.6
    late = step(layers, by_data(layers, 1, 4), 4, 6.0, Link(1e6, 0.1))
    assert late.bubbles_s.sum() == pytest.approx(4.0 + 6 * 0.1)  # both fit into one bucket


def balance(model: nn.Module, example: Any, **others: Any) -> LayerBalance:
    given = {"batch_size": 6, "workers": 8, "link": "1 Gbit/s", "step_s": 0.01} | others
    return layer_balance(model, example, **given)


@every("kind", list(KINDS))
def test_operations_are_those_that_torch_counts_in_both_passes(kind: str) -> None:
    build, example = KINDS[kind]
    model = build().train()
    rows = rows_of(example, 6)
    with FlopCounterMode(display=False) as counter:
        outputs = model(*rows.features)
        forward = counter.get_total_flops()
        CLASSES(outputs, rows.targets).backward()
    layers = balance(model, example, loss=CLASSES).layers
    assert 6 * sum(each.flop for each in layers) == counter.get_total_flops()
    assert 6 * sum(each.flop - each.backward_flop for each in layers) == forward
    parameters = sum(4 * each.numel() for each in model.parameters())
    assert sum(each.gradient_bytes for each in layers) == parameters


def test_a_convolution_has_the_papers_ratio_of_computing_to_communicating() -> None:
    """1.5 * rows * out_w * out_h / (2 - overlap), whatever its channels; 3 / 2 with an input's."""
    model = nn.Sequential(nn.Conv2d(5, 7, 3, bias=False), nn.Conv2d(7, 9, 3, bias=False))
    found = balance(model, torch.randn(2, 5, 12, 10))
    layer = found.layers[1]
    assert layer.flop / (2 * layer.gradient_bytes) == 1.5 * 8 * 6 / 2
    first = found.layers[0]
    assert first.backward_flop * 2 == first.flop  # nobody needs the gradient of the data
    assert (first.input_bytes, layer.input_bytes) == (4 * 5 * 12 * 10, 4 * 7 * 10 * 8)


def test_frozen_and_tied_parameters_are_sent_never_and_once() -> None:
    model = Transformer()
    model.head.weight = model.words.weight
    model.layers.layers[0].requires_grad_(requires_grad=False)
    found = balance(model, KINDS["transformer"][1], loss=CLASSES)
    trained = {id(p): 4 * p.numel() for p in model.parameters() if p.requires_grad}
    assert sum(each.gradient_bytes for each in found.layers) == sum(trained.values())
    sent = {each.name: each.gradient_bytes for each in found.layers}
    assert sent["head"] == 4 * 300  # the bias
    assert sent["layers.layers.0.linear1"] == 0


class After(nn.Module):
    """What comes after a layer."""

    def __init__(self, function: Any, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = layer or nn.Linear(16, 16)
        self.function = function

    def forward(self, rows: Tensor) -> Tensor:
        return self.function(self.layer(rows))


def attention(rows: Tensor) -> Tensor:
    heads = rows.unflatten(2, (4, 4)).transpose(1, 2)
    return nn.functional.scaled_dot_product_attention(heads, heads, heads)


def written_out(rows: Tensor) -> Tensor:
    heads = rows.unflatten(2, (4, 4)).transpose(1, 2)
    return (heads @ heads.mT / 2).softmax(3) @ heads


def few_keys(rows: Tensor) -> Tensor:
    heads = rows.unflatten(2, (4, 4)).transpose(1, 2)
    keys = heads[:, :2, :5]
    return nn.functional.scaled_dot_product_attention(heads, keys, keys, enable_gqa=True)


ENCODER = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)


@every_row(
    After(attention),
    After(few_keys),
    After(lambda rows: rows, ENCODER),
    After(lambda rows: rows[0], nn.LSTM(16, 5, 2, bidirectional=True, batch_first=True)),
)
def test_fused_operators_count_as_what_they_are_made_of(model: After) -> None:
    rows = torch.randn(6, 32, 16)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        copy.deepcopy(model).double()(rows.double())  # no LSTM of float64 is fused
    found = balance(model, rows)
    forward = sum(each.flop - each.backward_flop for each in found.layers)
    assert 6 * forward == counter.get_total_flops()
    assert found.notes == ()


def test_efficiency_is_that_of_the_same_model_written_out() -> None:
    rows, slow = torch.randn(2, 512, 16), {"link": "20 Mbit/s", "step_s": 0.001}
    fused, other = (
        balance(After(each), rows, **slow).step().efficiency for each in (attention, written_out)
    )
    assert fused == pytest.approx(other)
    assert fused < 0.99


@torch.library.custom_op("sparkdl_tests::double", mutates_args=())
def double(rows: Tensor) -> Tensor:
    return rows * 2


def frozen(rows: Tensor) -> Tensor:
    with torch.no_grad():
        return ENCODER.eval()(rows)


@every_row(
    (lambda rows: torch.fft.rfft(rows).abs(), "aten::_fft_r2c"),
    (lambda rows: torch.linalg.inv(rows.mT @ rows + torch.eye(16)), "aten::linalg_inv"),
    (lambda rows: torch.cdist(rows, rows), "aten::_cdist_forward"),
    (lambda rows: rows + double(rows.detach()), "sparkdl_tests::double"),
    (lambda rows: rows + frozen(rows), "aten::_transformer_encoder_layer_fwd"),
)
def test_what_torch_does_not_count_is_said(function: Any, operator: str) -> None:
    found = balance(After(function), torch.randn(2, 8, 16))
    assert f"torch does not count the operations of {operator}" in str(found)
    assert "in layer: they pass for none" in str(found)


def test_of_what_only_goes_through_the_numbers_nothing_is_said() -> None:
    def function(rows: Tensor) -> Tensor:
        twos = nn.functional.normalize(torch.where(rows > 0, rows, torch.full_like(rows, 2.0)))
        normed = nn.functional.layer_norm(rows, (8, 16), rows[0], rows[1]) + rows.softmax(2)
        moved = torch.index_add(rows, 1, torch.arange(8), twos).sort(2).values.cumsum(1)
        spun = torch.view_as_real(torch.polar(rows, twos) * torch.complex(rows, normed)).sum(3)
        return nn.functional.mse_loss(moved, spun) + nn.functional.huber_loss(rows, spun)

    assert balance(After(function), torch.randn(2, 8, 16)).notes == ()


def test_the_table_says_what_is_best_and_the_words_who_is_waited_for() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4096))
    found = balance(model, torch.randn(2, 3, 8, 8), step_s=0.001)
    table = found.table.set_index("layer")
    assert list(table.index) == ["0", "3"]
    assert table.best["0"] == "data"
    assert table.best["3"] in ("model", "hybrid")
    assert table.bubble_ms.sum() == pytest.approx(found.step().bubbles_s.sum() * 1e3)
    for text in (str(found), found._repr_html_()):
        assert "8 workers with 6 rows each at 1 Gbit/s" in text
        assert "waits longest for" in text
        assert "as given" in text
    assert balance(model, torch.randn(2, 3, 8, 8), workers=1).step().efficiency == 1.0


def test_computing_is_measured_here_without_a_given_time() -> None:
    given = {"batch_size": 4, "step_s": None, "loss": CLASSES}
    found = balance(Convolutions(1), KINDS["convolutions"][1], **given)
    assert found.compute_s > 0
    assert "cores" in found.explain()


class Nothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)
        self.scale = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.ones((), requires_grad=True)


EXAMPLE = torch.randn(2, 3, 8, 8)


@every_row(
    ({"workers": 0}, ConfigError, "workers must be"),
    ({"batch_size": 0}, ConfigError, "batch_size must be"),
    ({"link": 0}, ConfigError, "carries nothing"),
    ({"link": "fast"}, ConfigError, "cannot be read"),
    ({"step_s": 0}, ConfigError, "step_s must be"),
    ({"step_s": math.nan}, ConfigError, "step_s must be"),
    ({"example": torch.randn(2, 4, 8, 8)}, ModelError, "cannot be trained on 6 rows"),
    ({"example": Batch((), (), last=False)}, ConfigError, "got nothing"),
    ({"model": Nothing()}, ModelError, "no layer with parameters takes part"),
)
def test_bad_input_is_said(wrong: Any, error: type[Exception], said: str) -> None:
    model, example = wrong.pop("model", Convolutions(1)), wrong.pop("example", EXAMPLE)
    with pytest.raises(error, match=said):
        balance(model, example, **wrong)


Option = tuple[float, int]
Table = list[list[Option]]
OPTIONS = st.tuples(st.integers(0, 60).map(float), st.integers(0, 12))
TABLES = st.lists(st.lists(OPTIONS, min_size=1, max_size=3), min_size=1, max_size=5)


def seconds(chosen: tuple[Option, ...]) -> float:
    return math.fsum(each for each, _ in chosen)


def taken(chosen: tuple[Option, ...]) -> int:
    return sum(size for _, size in chosen)


def solved(table: Table, budget: int) -> tuple[Option, ...]:
    picks = fastest(table, budget)
    return tuple(layer[pick] for layer, pick in zip(table, picks, strict=True))


@given(TABLES, st.integers(0, 60))
def test_the_choice_is_that_of_trying_all(table: Table, budget: int) -> None:
    fits = [each for each in itertools.product(*table) if taken(each) <= budget]
    if not fits:
        with pytest.raises(ConfigError, match="too small"):
            fastest(table, budget)
        return
    found = solved(table, budget)
    assert seconds(found) == pytest.approx(min(map(seconds, fits)))
    assert taken(found) <= budget


@given(TABLES)
def test_the_error_names_the_smallest_budget_that_is_enough(table: Table) -> None:
    least = min(map(taken, itertools.product(*table)))
    with pytest.raises(ConfigError, match=rf"least take {least:,}\."):
        fastest(table, least - 1)
    assert taken(solved(table, least)) == least


def test_a_hundred_times_as_many_layers_are_still_exact() -> None:
    """Layers that are all alike have a closed form: as many keep as fit."""
    table = [[(1.0, 7), (1.5, 2)]] * 2000
    found = solved(table, 2 * 2000 + 5 * 1234 + 3)
    assert seconds(found) == 2000 + 0.5 * (2000 - 1234)
    assert taken(found) == 2 * 2000 + 5 * 1234


def test_options_that_the_solver_takes_for_equally_large_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A terabyte and a byte more; the solver may be asked a few times, not once for each byte."""
    solve, asked = scipy.optimize.milp, itertools.count(1)

    def few_times(*given: Any, **options: Any) -> Any:
        assert next(asked) < 5
        return solve(*given, **options)

    monkeypatch.setattr(scipy.optimize, "milp", few_times)
    assert fastest([[(0.0, 10**12 + 9), (1.0, 10**12)]], 10**12) == [1]
    assert fastest([[(0.0, 10**12 + 9), (1.0, 10**12)]] * 2, 2 * 10**12 + 9) in ([0, 1], [1, 0])


def test_no_layers_take_nothing_and_a_layer_without_options_is_refused() -> None:
    assert fastest([], 0) == []
    with pytest.raises(ConfigError, match="no options to choose from"):
        fastest([[(1.0, 1)], []], 10)
