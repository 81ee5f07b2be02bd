"""The number of rows of unequal length."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_rows import ragged

from sparkdl.feed.columns.ragged import Ragged
from sparkdl.feed.statistics.fingerprint import fingerprint


class TestFingerprint:
    """One number for rows of unequal length, whatever their order and their neighbours."""

    @settings(max_examples=60, deadline=None)
    @given(rows=st.lists(st.lists(st.integers(-3, 3), max_size=6), min_size=1, max_size=8))
    def test_it_is_the_sum_over_the_rows_in_any_order(self, rows: list[list[float]]) -> None:
        for dtype in (torch.int64, torch.float32, torch.uint8, torch.bfloat16):
            column = ragged(rows, torch.int64)
            column = Ragged(column.values.to(dtype), column.lengths)
            whole = fingerprint([column])
            one_by_one = sum(
                fingerprint([column.pick(torch.tensor([k]))]) for k in reversed(range(len(rows)))
            )
            assert whole == one_by_one % (1 << 64)

    def test_one_value_one_place_and_trailing_zeros_change_it(self) -> None:
        variants: list[list[list[float]]] = [
            [[1, 2], [3]],
            [[1, 2], [4]],
            [[2, 1], [3]],
            [[1, 2, 0], [3]],
            [[1, 2], [3, 0]],
            [[1], [2, 3]],
            [[1, 2, 3], []],
            [[1, 2], [3], []],
        ]
        assert len({fingerprint([ragged(rows)]) for rows in variants}) == len(variants)

    def test_nan_is_one_value(self) -> None:
        values = torch.tensor([1.0, float("nan")])
        other = values.view(torch.int32).clone()
        other[1] ^= 1
        both = [Ragged(v, torch.tensor([2])) for v in (values, other.view(torch.float32))]
        assert fingerprint([both[0]]) == fingerprint([both[1]])
