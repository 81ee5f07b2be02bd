"""Parameters that are never trained: all build the same, and nobody changes them unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from every_row import every
from torch import Tensor, nn
from toys import DTYPES

from sparkdl.errors import ModelError, TrainingError
from sparkdl.replica.frozen import BLOCK_BYTES, FrozenParameters


class Backbone(nn.Module):
    """One frozen parameter and one that is trained."""

    def __init__(self, values: Tensor, name: str = "codes") -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(values, requires_grad=False))
        self.head = nn.Parameter(torch.zeros(3))


def fingerprint_of(values: Tensor, name: str = "codes") -> str:
    return FrozenParameters(Backbone(values, name)).fingerprint


def numbers(count: int = 12, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    values = torch.randn(count, generator=generator, dtype=torch.float64) * 100
    return values.to(torch.uint8 if dtype is torch.bool else dtype).to(dtype)


LARGE = BLOCK_BYTES // 4 + 5
"""Values of four bytes: one block, and a few beside it."""


@every("place", [0, 1, BLOCK_BYTES // 4 - 1, BLOCK_BYTES // 4, LARGE - 1])
def test_a_single_bit_makes_another_fingerprint(place: int) -> None:
    values, other = numbers(LARGE), numbers(LARGE)
    other.view(torch.int32)[place] ^= 1
    assert fingerprint_of(values) == fingerprint_of(values.clone())
    assert fingerprint_of(values) != fingerprint_of(other)


@every(
    "change",
    [
        lambda values: values.flip(0),
        lambda values: values.view(2, -1),
        lambda values: values.double(),
        lambda values: values.view(torch.int32),
        lambda values: values * -1,
        lambda values: values[:-1],
    ],
)
def test_other_parameters_have_another_fingerprint(change: Callable[[Tensor], Tensor]) -> None:
    values = numbers()
    assert fingerprint_of(values) != fingerprint_of(change(values))
    assert fingerprint_of(values) != fingerprint_of(values, "other_name")


@every("dtype", [*DTYPES, torch.complex64, torch.complex128])
def test_every_dtype_has_one_and_where_the_values_lie_makes_no_difference(
    dtype: torch.dtype,
) -> None:
    values = numbers(24, dtype).view(2, 3, 2, 2)
    elsewhere = torch.cat([values.view(-1)[:1], values.view(-1)])[1:].view(2, 3, 2, 2)
    last = values.to(memory_format=torch.channels_last)
    assert fingerprint_of(values) == fingerprint_of(elsewhere) == fingerprint_of(last)


def test_each_parameter_counts_once_whatever_its_size() -> None:
    frozen = FrozenParameters(nn.Linear(2, 2))
    frozen.require_unchanged()
    assert (frozen.fingerprint, frozen.numel) == ("", 0)
    assert fingerprint_of(torch.empty(0)) != fingerprint_of(torch.tensor(0.0)) != ""
    module = Backbone(numbers(12))
    module.again = module.codes
    assert FrozenParameters(module).numel == 12


def test_a_parameter_in_the_memory_of_one_that_is_trained_is_refused() -> None:
    module = Backbone(numbers(12))
    module.head = nn.Parameter(module.get_parameter("codes").data)
    with pytest.raises(ModelError, match=r"'codes' requires no gradient, but shares .* with 'h"):
        FrozenParameters(module)


def unfreeze(parameter: nn.Parameter) -> None:
    parameter.requires_grad_(True)


def write_in_place(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.mul_(0.99)


def write_to_another_view(parameter: nn.Parameter) -> None:
    parameter.detach()[3] = 7


def replace_values(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data * 2


def write_to_data(parameter: nn.Parameter) -> None:
    parameter.data.mul_(0.99)


GLANCE, LOOK = FrozenParameters.glance, FrozenParameters.require_unchanged


@every(
    ("change", "check", "words"),
    [
        (write_in_place, GLANCE, r"'codes'.*values have changed.*register_buffer"),
        (write_to_another_view, GLANCE, r"'codes'.*values have changed.*register_buffer"),
        (unfreeze, GLANCE, r"'codes' required no gradient.*but does now"),
        # these leave no trace
        (write_to_data, LOOK, r"'codes'.*values have changed"),
        (replace_values, LOOK, r"'codes'.*values have changed"),
    ],
)
def test_a_change_is_noticed_if_it_leaves_no_trace_by_a_look_at_all_values(
    change: Callable[[nn.Parameter], None], check: Callable[[FrozenParameters], None], words: str
) -> None:
    module = Backbone(numbers())
    frozen = FrozenParameters(module)
    frozen.glance()
    change(module.get_parameter("codes"))
    for _ in range(2):
        with pytest.raises(TrainingError, match=words):
            check(frozen)


@every("change", [write_in_place, unfreeze])
def test_of_many_parameters_each_is_glanced_at_in_its_turn(
    change: Callable[[nn.Parameter], None],
) -> None:
    module = nn.ParameterList([nn.Parameter(numbers(), requires_grad=False) for _ in range(100)])
    frozen = FrozenParameters(module)
    for _ in range(9):
        frozen.glance()
    for changed in (0, 31, 32, 99):
        with torch.no_grad():
            before = module[changed].clone()
            change(module[changed])
        found = []
        for _ in range(8):
            try:
                frozen.glance()
            except TrainingError as error:
                found.append(str(error))
        assert [f"'{changed}'" in each for each in found] == [True, True]
        module[changed].requires_grad_(False)
        with torch.no_grad():
            module[changed].copy_(before)


def test_the_same_values_are_allowed_also_in_another_place_or_made_for_inference() -> None:
    """As models do that clip all their weights, or keep a row of an embedding at zero."""
    with torch.inference_mode():
        values = numbers()
    FrozenParameters(Backbone(values)).require_unchanged()
    module = Backbone(numbers())
    codes, frozen = module.get_parameter("codes"), FrozenParameters(module)
    with torch.no_grad():
        codes.clamp_(-1e6, 1e6)
        frozen.glance()
        codes[0].copy_(codes[0].clone())
        frozen.glance()
    codes.data = numbers()
    frozen.require_unchanged()


class Quantized(Tensor):
    """Eight-bit codes with a scale, in tensors of their own, as quantized weights are kept."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Quantized:
        made: Quantized = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if call is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(f"{call} of quantized weights")


def test_weights_that_are_kept_in_several_tensors_count_by_all_of_them() -> None:
    def module(code: int = 3, scale: float = 0.5) -> nn.Module:
        codes = torch.full((4,), code, dtype=torch.int8)
        return Backbone(Quantized(codes, torch.tensor(scale)))

    prints = [FrozenParameters(each).fingerprint for each in (module(), module(4), module(3, 0.6))]
    assert len(set(prints)) == 3
    assert prints[0] == FrozenParameters(module()).fingerprint
    frozen = FrozenParameters(changed := module())
    changed.get_parameter("codes").codes[1] = 5  # type: ignore[attr-defined]
    with pytest.raises(TrainingError, match="'codes'"):
        frozen.require_unchanged()
