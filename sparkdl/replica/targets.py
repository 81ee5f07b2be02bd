"""Whether a loss takes one number per row as (rows,) or as (rows, 1): tried out, not guessed.

Outputs (rows, 1) and targets (rows,) broadcast to (rows, rows), each row compared with all others',
without an error; and so do outputs (rows,) and targets (rows, 1).
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparkdl.outputs import parts_of
from sparkdl.protocols import TargetDims, Targets

ROWS = (5, 7, 11, 13)
"""Numbers of rows to try with: the first that is no width of the outputs."""
_MOST_LABELS = 4
"""With more, of which one number each could have either shape, all change their shape or none."""


def shaped(targets: Targets, dims: TargetDims) -> Targets:
    """Targets in the shapes that the loss takes.

    Args:
        targets: as the columns have them; others than one number per row stay as they are.
        dims: from ``chosen_dims``.
    """
    if not any(dims):
        return targets
    if isinstance(targets, Tensor):
        return _shaped(targets, dims[0])
    return tuple(map(_shaped, targets, dims))


def _shaped(targets: Tensor, dims: int | None) -> Tensor:
    if dims == 2 and targets.dim() == 1:
        return targets.unsqueeze(1)
    if dims == 1 and targets.dim() == 2 and targets.shape[1] == 1:
        return targets.squeeze(1)
    return targets


def distinct_rows(outputs: Callable[[int], Any]) -> tuple[int, Any]:
    """A number of rows that nothing else in a model's outputs has, and the outputs.

    Args:
        outputs: what the model returns for so many rows.
    """
    for rows in ROWS:
        found = outputs(rows)
        if rows not in widths(found):
            break
    return rows, found


def widths(values: Any) -> set[int]:
    """The sizes of all dimensions but the first."""
    return {size for each in _tensors(values) for size in each.shape[1:]}


def chosen_dims(loss: Callable[[Targets], Any], targets: Targets) -> TargetDims:
    """The shapes in which a loss compares each row with its own target only.

    Args:
        loss: from the targets to whatever it returns.
        targets: as the columns have them, of so many rows that no width is equal to their number.

    Returns:
        The fewest changes to the columns' shapes with which no value of rows x rows is made, and no
        error raised; no change where there are no such.
    """
    several = (targets,) if isinstance(targets, Tensor) else targets
    rows = len(several[0]) if several else 0
    scalar = [i for i, each in enumerate(several) if each.shape in ((rows,), (rows, 1))]
    if not scalar:
        return ()
    raised = False
    for changed in _subsets(scalar):
        dims = tuple(3 - each.dim() if i in changed else None for i, each in enumerate(several))
        tried = _Watch(shaped(targets, dims), rows)
        if tried.fits(loss, widening=not raised):
            return dims if changed else ()
        raised = raised or (not changed and tried.raised)
    return ()


def crosses_rows(values: Any, rows: int) -> bool:
    """Whether values have more than one dimension of all rows.

    Args:
        values: any.
        rows: how many rows, which are the width of nothing.
    """
    return any(list(each.shape).count(rows) > 1 for each in _tensors(values))


def _subsets(labels: Sequence[int]) -> Iterator[tuple[int, ...]]:
    sizes = range(len(labels) + 1) if len(labels) <= _MOST_LABELS else (0, len(labels))
    return itertools.chain.from_iterable(itertools.combinations(labels, size) for size in sizes)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at every tensor that is made, inside of torch's own functions too.

    Args:
        targets: what the loss is given.
        rows: how many.

    Attributes:
        raised: whether the loss failed.
    """

    def __init__(self, targets: Targets, rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.raised = False
        self._targets = targets
        self._rows = rows
        self._crossed = self._widened = False
        # Kept, so that no other tensor gets one's id.
        self._columns = [each for each in _tensors(targets) if each.shape == (rows, 1)]

    def fits(self, loss: Callable[[Targets], Any], *, widening: bool) -> bool:
        """Whether the loss takes the targets, and makes no value of rows x rows of them.

        Args:
            loss: from the targets to whatever it returns.
            widening: whether targets (rows, 1) may be compared with several numbers per row.
        """
        try:
            with warnings.catch_warnings(), self:
                warnings.simplefilter("ignore")  # it will warn again
                # torch's own losses only warn before they broadcast.
                warnings.filterwarnings("error", message="Using a target size")
                loss(self._targets)
        except Exception:  # the user's loss may raise anything; it is called again, and reported
            self.raised = True
            return False
        return not self._crossed and (widening or not self._widened)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one of torch's elementary operations."""
        result = func(*args, **(kwargs or {}))
        pointwise = torch.Tag.pointwise in func.tags
        compared = pointwise and any(
            each is column for each in tree_leaves(args) for column in self._columns
        )
        if pointwise:
            self._crossed |= _is_outer([each.shape for each in args if isinstance(each, Tensor)])
        for each in _tensors(result):
            self._crossed |= crosses_rows(each, self._rows)
            if compared and each.shape == (self._rows, 1):
                self._columns.append(each)
            self._widened |= compared and each.numel() > self._rows
        return result


def _is_outer(shapes: Sequence[torch.Size]) -> bool:
    """Whether (k, 1) meets (k,): also the rows that a loss has chosen are compared with all."""
    return any(
        len(one) == 2 and one[0] > 1 and one[1] == 1 and other == one[:1]
        for one, other in itertools.permutations(shapes, 2)
    )


def _tensors(value: Any) -> list[Tensor]:
    leaves = [value] if isinstance(value, Tensor) else tree_leaves(value)
    if not isinstance(value, (Tensor, tuple, list)):
        leaves = tree_leaves(dict(parts_of(value)))
    return [each for each in leaves if isinstance(each, Tensor)]
