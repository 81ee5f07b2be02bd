"""Codecs: both ends of the wire end with the same bits, and small changes are not lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.averager.codec import CODECS, BFloat16Changes, Codec, FullPrecision
from sparkdl.protocols import Segment

FLOATS = Segment("parameters", torch.float32, 4)
INTEGERS = Segment("buffers", torch.int64, 1)


def test_codecs_are_found_by_the_name_of_the_wire_dtype() -> None:
    assert {name: codec.name for name, codec in CODECS.items()} == {
        "float32": "float32",
        "bfloat16": "bfloat16",
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.int64])
def test_full_precision_sends_the_replicas_own_type(dtype: torch.dtype) -> None:
    assert FullPrecision().wire_dtype(Segment("parameters", dtype, 1)) is dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_bfloat16_takes_two_bytes_a_value(dtype: torch.dtype) -> None:
    segment = Segment("parameters", dtype, 1)
    assert BFloat16Changes().wire_dtype(segment).itemsize == 2


def test_bfloat16_leaves_integers_alone() -> None:
    codec = BFloat16Changes()
    counters = torch.tensor([1_000_001])
    assert codec.wire_dtype(INTEGERS) is torch.int64
    assert codec.encode(counters, torch.tensor([5]), INTEGERS) is counters
    target = torch.tensor([0])
    codec.decode(torch.tensor([7]), target, torch.tensor([5]), INTEGERS)
    assert target.item() == 7


@given(
    start=st.floats(-100, 100, width=32),
    changes=st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=20),
)
def test_bfloat16_keeps_center_and_replica_bit_identical(
    start: float, changes: list[float]
) -> None:
    codec = BFloat16Changes()
    center, mean = [torch.tensor([start])], [torch.empty(1)]
    base, values = torch.tensor([start]), torch.tensor([start])
    segment = Segment("parameters", torch.float32, 1)
    for change in changes:
        values += change
        mean[0].copy_(codec.encode(values, base, segment))
        center, reply = codec.commit(center, mean)
        codec.decode(reply[0].to(torch.bfloat16), values, base, segment)
        assert values.numpy().tobytes() == base.numpy().tobytes() == center[0].numpy().tobytes()


def test_bfloat16_does_not_lose_small_changes_of_large_values() -> None:
    """1 + 1e-4 is 1 in bfloat16; a hundred such changes must arrive as a hundred."""
    codec = BFloat16Changes()
    center, mean = [torch.ones(1)], [torch.empty(1)]
    base, values = torch.ones(1), torch.ones(1)
    for _ in range(100):
        values += 1e-4
        mean[0].copy_(codec.encode(values, base, FLOATS))
        center, reply = codec.commit(center, mean)
        codec.decode(reply[0].to(torch.bfloat16), values, base, FLOATS)
    assert center[0].item() == pytest.approx(1.01, abs=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("codec", [FullPrecision(), BFloat16Changes()], ids=lambda c: c.name)
def test_replies_arrive_on_the_cpu_also_for_replicas_on_a_gpu(codec: Codec) -> None:
    base, values = torch.ones(4, device="cuda"), torch.ones(4, device="cuda")
    reply = torch.full((4,), 2.0).to(codec.wire_dtype(FLOATS))
    codec.decode(reply, values, base if codec.keeps_base else None, FLOATS)
    assert values.tolist() == [3.0 if codec.keeps_base else 2.0] * 4


def test_full_precision_makes_the_mean_the_center_without_a_copy() -> None:
    center, mean = [torch.zeros(2)], [torch.ones(2)]
    new_center, reply = FullPrecision().commit(center, mean)
    assert new_center[0] is mean[0]
    assert reply[0] is mean[0]


@pytest.mark.parametrize("codec", [FullPrecision(), BFloat16Changes()], ids=lambda c: c.name)
def test_a_reply_that_nothing_changed_changes_nothing(codec: Codec) -> None:
    center = [torch.tensor([1.5, -2.0]), torch.tensor([7])]
    reply = codec.unchanged(center, [torch.tensor([9.0, 9.0]), torch.tensor([9])])
    for segment, middle, answer in zip((FLOATS, INTEGERS), center, reply, strict=True):
        base, values = middle.clone(), torch.full_like(middle, 100)
        codec.decode(answer.to(codec.wire_dtype(segment)), values, base, segment)
        assert torch.equal(values, middle)
        assert torch.equal(base, middle)
