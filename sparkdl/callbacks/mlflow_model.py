"""A trained module as MLflow's own PyTorch flavor saves it, with its signature.

It is saved as a graph (``torch.export``), which loads without any of the user's code and runs none;
a module that cannot be exported is pickled.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparkdl.errors import ModelError
from sparkdl.outputs import parts_of
from sparkdl.protocols import UNKNOWN, ColumnSpec
from sparkdl.user_code.tracebacks import text_of
from sparkdl.version import __version__

logger = logging.getLogger(__name__)

ROWS = 2
"""Rows of the example that the graph is made with; torch would take one for a constant."""
LENGTH = 3
"""The length, in the example, of what has none of its own."""


class OfColumns(nn.Module):
    """A module as a function of one tensor per column that returns a tensor, or tensors by name.

    Args:
        module: the user's.
        features: the name and dtype of each column.
        by_name: whether it takes them by name.
        as_kwargs: whether that means as arguments, not as one dict.
    """

    def __init__(
        self,
        module: nn.Module,
        features: Sequence[ColumnSpec],
        *,
        by_name: bool = False,
        as_kwargs: bool = False,
    ) -> None:
        super().__init__()
        self.module = module
        self._features = tuple(features)
        self._by_name, self._as_kwargs = by_name, as_kwargs

        def forward(*columns: Tensor) -> Any:
            return self._predict(columns)

        # torch.export takes ``*columns`` for one argument, and would fix its length.
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(f"column_{index}", kind) for index in range(len(features))]
        )
        self.forward = forward

    def _predict(self, columns: Sequence[Tensor]) -> Any:
        tensors = {
            spec.name: column.to(spec.dtype)
            for spec, column in zip(self._features, columns, strict=True)
        }
        if not self._by_name:
            outputs = self.module(*tensors.values())
        else:
            outputs = self.module(**tensors) if self._as_kwargs else self.module(tensors)
        if isinstance(outputs, Tensor):
            return outputs
        parts = {
            str(name): each for name, each in parts_of(outputs).items() if isinstance(each, Tensor)
        }
        if not parts:
            raise ModelError(
                f"the model returns a {type(outputs).__name__} without any tensor: it cannot be "
                "logged"
            )
        return parts


def saving_arguments(model: OfColumns, features: Sequence[ColumnSpec]) -> dict[str, Any]:
    """What ``mlflow.pytorch.save_model`` is given for a module as a function of columns."""
    example = tuple(
        torch.zeros(
            (ROWS, *(LENGTH if size == UNKNOWN else size for size in each.row_shape)),
            dtype=_numpy_has(each.dtype),
        )
        for each in features
    )
    with torch.no_grad():
        outputs = model(*example)
    requirements = [f"torch=={torch.__version__.partition('+')[0]}"]
    arguments = {"signature": _signature(features, outputs), "pip_requirements": requirements}
    try:
        torch.export.export(model, example)
    except Exception as error:  # the user's module may fail for many reasons
        logger.warning(
            "the model cannot be exported as a graph (%s: %s), so it is logged as a pickle, "
            "which MLflow loads only where MLFLOW_ALLOW_PICKLE_DESERIALIZATION is 'true'",
            type(error).__name__,
            text_of(error).partition("\n")[0],
        )
        alone = len(features) == 1 and isinstance(outputs, Tensor)
        requirements += [] if alone else [f"sparkdl-torch=={__version__}"]
        pickled = model.module if alone else model
        return arguments | {"pytorch_model": pickled, "serialization_format": "pickle"}
    shown: Any = example[0].numpy() if len(example) == 1 else example
    return arguments | {"pytorch_model": model, "input_example": shown}


def _signature(features: Sequence[ColumnSpec], outputs: Any) -> Any:
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    def spec(dtype: torch.dtype, shape: Sequence[int], name: str | None) -> Any:
        as_numpy = torch.empty(0, dtype=_numpy_has(dtype)).numpy().dtype
        return TensorSpec(as_numpy, (-1, *shape), name=name)

    several = len(features) > 1
    named = {None: outputs} if isinstance(outputs, Tensor) else outputs
    return ModelSignature(
        Schema([spec(e.dtype, e.row_shape, e.name if several else None) for e in features]),
        Schema([spec(each.dtype, each.shape[1:], name) for name, each in named.items()]),
    )


def _numpy_has(dtype: torch.dtype) -> torch.dtype:
    """A dtype that MLflow has too: NumPy has no bfloat16."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
