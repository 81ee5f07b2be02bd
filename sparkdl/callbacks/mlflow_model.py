"""A trained module as an MLflow model, with its signature, and as a function of columns.

It is saved as a graph (``torch.export``), which loads without any of the user's code and runs none;
a module that cannot be exported is pickled. As ``mlflow.pyfunc``, MLflow itself loads modules that
take one tensor and return one; this file loads the others.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
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
        self._names = [each.name for each in features]
        self._dtypes = [each.dtype for each in features]
        self._by_name, self._as_kwargs = by_name, as_kwargs

        def forward(*columns: Tensor) -> Any:
            return self._predict(columns)

        # torch.export takes ``*columns`` for one argument, and would fix its length.
        each = [f"column_{index}" for index in range(len(features))]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, kind) for name in each]
        )
        self.forward = forward

    def _predict(self, columns: Sequence[Tensor]) -> Any:
        """Predict.

        Args:
            columns: each of shape (rows, ...).

        Returns:
            The tensor that the module returns; several in a dict by their names or positions.
        """
        tensors = [column.to(t) for column, t in zip(columns, self._dtypes, strict=True)]
        if not self._by_name:
            outputs = self.module(*tensors)
        elif self._as_kwargs:
            outputs = self.module(**dict(zip(self._names, tensors, strict=True)))
        else:
            outputs = self.module(dict(zip(self._names, tensors, strict=True)))
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


def example_of(features: Sequence[ColumnSpec]) -> list[np.ndarray]:
    """Two rows of zeros per column, each of shape (2, ...) and of MLflow's dtype for it."""
    return [
        np.zeros((ROWS, *(LENGTH if size == UNKNOWN else size for size in each.row_shape)), t)
        for each, t in ((each, _numpy_dtype(each.dtype)) for each in features)
    ]


def signature_of(features: Sequence[ColumnSpec], outputs: Any) -> Any:
    """The signature of a module as a function of columns.

    Args:
        features: what it takes.
        outputs: what it returned for ``example_of(features)``.
    """
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    several = len(features) > 1
    inputs: list[Any] = [
        TensorSpec(
            np.dtype(_numpy_dtype(each.dtype)),
            (-1, *each.row_shape),
            name=each.name if several else None,
        )
        for each in features
    ]
    named = {None: outputs} if isinstance(outputs, Tensor) else outputs
    found: list[Any] = [
        TensorSpec(np.dtype(_numpy_dtype(each.dtype)), (-1, *each.shape[1:]), name=name)
        for name, each in named.items()
    ]
    return ModelSignature(Schema(inputs), Schema(found))


class Flavor:
    """What ``mlflow.models.Model.log`` calls a flavor: an object that saves a model."""

    __name__ = "sparkdl.callbacks.mlflow_model"

    def save_model(self, path: str, mlflow_model: Any, model: OfColumns, features: Any) -> None:
        """Save a model into a new directory.

        Args:
            path: the directory.
            mlflow_model: MLflow's description of the model.
            model: the model to save.
            features: the columns that it takes.
        """
        import mlflow.pytorch

        example = example_of(features)
        with torch.no_grad():
            outputs = model(*map(torch.from_numpy, example))
        alone = len(features) == 1 and isinstance(outputs, Tensor)
        arguments = {
            "path": path,
            "mlflow_model": mlflow_model,
            "signature": signature_of(features, outputs),
            "pip_requirements": [
                f"torch=={torch.__version__.partition('+')[0]}",
                *([] if alone else [f"sparkdl-torch=={__version__}"]),
            ],
        }
        shown: Any = example[0] if alone else tuple(map(torch.from_numpy, example))
        try:
            torch.export.export(model, tuple(map(torch.from_numpy, example)))
        except Exception as error:  # the user's module may fail for many reasons
            logger.warning(
                "the model cannot be exported as a graph (%s: %s), so it is logged as a pickle, "
                "which MLflow loads only where MLFLOW_ALLOW_PICKLE_DESERIALIZATION is 'true'",
                type(error).__name__,
                text_of(error).partition("\n")[0],
            )
            mlflow.pytorch.save_model(
                model.module if alone else model,
                serialization_format="pickle",
                **arguments,
            )
        else:
            mlflow.pytorch.save_model(model, input_example=shown, **arguments)
        if not alone:
            self._add_function(Path(path), mlflow_model)

    def _add_function(self, path: Path, mlflow_model: Any) -> None:
        """Have ``mlflow.pyfunc`` load it with this module."""
        from mlflow import pyfunc

        pyfunc.add_to_model(
            mlflow_model,
            loader_module=self.__name__,
            data="data",
            conda_env="conda.yaml",
            python_env="python_env.yaml",
        )
        mlflow_model.save(str(path / "MLmodel"))


def _load_pyfunc(path: str) -> Any:
    """Called by ``mlflow.pyfunc.load_model`` with the directory of the model's data."""
    import mlflow.models
    import mlflow.pytorch

    directory = os.path.dirname(os.path.abspath(path))
    described = mlflow.models.Model.load(directory)
    return _Function(mlflow.pytorch.load_model(directory), described.signature.inputs.inputs)


class _Function:
    """Predicts from columns by name.

    Args:
        model: called like ``OfColumns``.
        inputs: the name, shape and dtype of each column.
    """

    def __init__(self, model: nn.Module, inputs: Sequence[Any]) -> None:
        self._model = model
        self._inputs = inputs

    def predict(self, data: Any, params: Mapping[str, Any] | None = None) -> Any:
        """Predict.

        Args:
            data: a pandas frame, where each cell of an array column holds an array, or a dict of
                numpy arrays by column; for a single column, also its array.
            params: must be empty.

        Returns:
            An array of shape (rows, ...), or several in a dict by name.
        """
        if params:
            raise ValueError(f"the model takes no parameters, but was given {sorted(params)}")
        columns = [self._column(data, each) for each in self._inputs]
        with torch.no_grad():
            outputs = self._model(*columns)
        if isinstance(outputs, Tensor):
            return outputs.float().numpy() if outputs.dtype is torch.bfloat16 else outputs.numpy()
        return {name: each.numpy() for name, each in outputs.items()}

    def _column(self, data: Any, spec: Any) -> Tensor:
        if isinstance(data, np.ndarray):
            values = data
        else:
            values = np.asarray(data[spec.name or next(iter(data))])
        if values.dtype == object:
            values = np.stack(list(values))
        return torch.from_numpy(np.ascontiguousarray(values, dtype=spec.type))


def _numpy_dtype(dtype: torch.dtype) -> Any:
    """NumPy's dtype; it has no bfloat16, so such values are converted."""
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    return torch.empty(0, dtype=wide).numpy().dtype
