"""``TorchModel``: a trained module whose outputs become columns of your choice.

Of a module that was trained elsewhere, what ``transform`` has to know is found out by an example.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from sparkdl.arguments import counted, listed
from sparkdl.checkpoint.module_files import SavedModule
from sparkdl.encodings import IMAGE
from sparkdl.encodings.any_size import FITS
from sparkdl.errors import ConfigError, ModelError
from sparkdl.estimator.fitted import FittedModel
from sparkdl.estimator.head import head_of
from sparkdl.estimator.outputs import ChosenOutputs, require_any_length
from sparkdl.feed.schema import Ragged, inputs_described, model_inputs
from sparkdl.outputs import Widths, described, form_of, pick, widths_of
from sparkdl.process.randomness import borrowed_random_numbers
from sparkdl.protocols import UNKNOWN, ColumnSpec, Padding, SequenceInput
from sparkdl.replica import forward
from sparkdl.replica.buffers import left_as_it_was
from sparkdl.replica.initial import has_lazy_parameters
from sparkdl.spark.required import jvm_named, require_session
from sparkdl.spark.rows.column_overrides import (
    ColumnOverrides,
    ImageColumns,
    ImageScale,
    require_distinct,
)
from sparkdl.spark.rows.converters import function, optional
from sparkdl.user_code.exported import as_module
from sparkdl.user_code.tracebacks import message_of

if TYPE_CHECKING:
    from sparkdl.volumes.run import VolumeSummary
    from sparkdl.volumes.store import Place


_ROWS = 5
"""A number that few models have of layers or classes, so that an output's length tells whether it
has one value per row."""

Example = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
"""Features of at least one row, in tensors of shape (rows, ...): one, one per argument, or one per
name."""


def named_features(example: Example, names: Sequence[str]) -> dict[str, Tensor]:
    """The example's tensors by the columns that such rows will come from.

    Args:
        example: as the user gave it.
        names: of the columns, in the order of the model's arguments.

    Raises:
        ConfigError: the example does not have one tensor per column, or has no rows.
    """
    if isinstance(example, Mapping):
        found = dict(example)
        if list(found) != list(names):
            raise ConfigError(
                f"the example has {listed(map(repr, found))}, but the feature columns are "
                f"{listed(map(repr, names))}. Name the same ones in the same order"
            )
    else:
        tensors = [example] if isinstance(example, Tensor) else list(example)
        if len(tensors) != len(names):
            raise ConfigError(
                f"the example has {counted(len(tensors), 'tensor')} for "
                f"{counted(len(names), 'feature column')}: {listed(names)}. Name one per "
                "tensor: featuresCols=[...]"
            )
        found = dict(zip(names, tensors, strict=True))
    rows = {
        len(tensor) if isinstance(tensor, Tensor) and tensor.dim() else 0
        for tensor in found.values()
    }
    if len(rows) != 1 or rows == {0}:
        shown = listed(f"'{name}' {described(tensor)}" for name, tensor in found.items())
        raise ConfigError(
            "an example is the module's input for a few rows, each tensor of shape (rows, ...); "
            f"this one is {shown or 'empty'}"
        )
    return found


def specs_of(features: Mapping[str, Tensor], overrides: ColumnOverrides) -> list[ColumnSpec]:
    """The tensors that the columns become.

    Args:
        features: of the example, by column.
        overrides: which columns hold images or are padded, and how.

    Raises:
        ConfigError: a column cannot be one of images, or cannot be padded.
    """
    images = overrides.images
    return [
        _spec_of(name, tensor, images if name in images.names else None, overrides.padding(name))
        for name, tensor in features.items()
    ]


def _spec_of(
    name: str, tensor: Tensor, images: ImageColumns | None, padding: Padding | None
) -> ColumnSpec:
    shape = tuple(tensor.shape[1:])
    if padding is None and images is None:
        return ColumnSpec(name, tensor.dtype, shape)
    if padding is None and images is not None:
        encoding = IMAGE if images.size is None else FITS[images.fit]
        fault = encoding.shape_fault(shape)
        if fault is not None:
            raise ConfigError(f"{fault}; the example has '{name}' of {described(tensor)}")
        images.shape(name, shape)
        scale = images.floats(name, tensor.dtype, shape[0])
        dtype = tensor.dtype if scale is None else torch.uint8
        return ColumnSpec(name, dtype, shape, encoding, scale=scale)
    if images is not None or padding is None or len(shape) not in (1, 2) or shape[0] < 2:
        raise ConfigError(
            f"padCols pads rows of numbers or of items, but the example has '{name}' of "
            f"{described(tensor)}: give it rows of two items or more, shape (rows, items) or "
            "(rows, items, width)"
        )
    return ColumnSpec(name, tensor.dtype, (UNKNOWN, *shape[1:]), padding=padding)


def output_widths(
    module: nn.Module,
    features: Mapping[str, Tensor],
    specs: Sequence[ColumnSpec],
    *,
    by_name: bool,
    as_kwargs: bool,
) -> Widths:
    """Run a module on an example to learn what it returns, and leave it as it was.

    Args:
        module: any, on the CPU.
        features: the example, by column.
        specs: what the columns become.
        by_name: whether it takes its features by name.
        as_kwargs: whether as keyword arguments instead of one dict.

    Raises:
        ModelError: the module fails on the example, or returns nothing that can be a column.
        ConfigError: the module is not on the CPU.
    """
    elsewhere = {str(each.device) for each in (*module.parameters(), *module.buffers())} - {"cpu"}
    if elsewhere:
        raise ConfigError(
            f"the module is on {', '.join(sorted(elsewhere))}, and cannot be sent from there to "
            "executors, which may have no such device: give module.cpu(). predictDevice says "
            "where it predicts"
        )
    rows = torch.arange(_ROWS)
    columns = {name: tensor[rows % len(tensor)] for name, tensor in features.items()}
    # Lazy layers stay as the example has initialized them.
    with left_as_it_was(module, values=not has_lazy_parameters(module)):
        _to_evaluation(module)
        widths = _widths(module, columns, specs, 0, by_name, as_kwargs)
        if any(spec.padding is not None for spec in specs):
            shorter = _widths(module, columns, specs, 1, by_name, as_kwargs)
            require_any_length(widths, shorter, list(widths))
    return widths


def _to_evaluation(module: nn.Module) -> None:
    try:
        module.eval()
    except NotImplementedError as error:
        raise ModelError(
            f"the module cannot be put into evaluation mode: {error} For a torch.export result, "
            "give the program itself, not its module()"
        ) from error


def _widths(
    module: nn.Module,
    columns: Mapping[str, Tensor],
    specs: Sequence[ColumnSpec],
    less: int,
    by_name: bool,
    as_kwargs: bool,
) -> Widths:
    """What a module returns for rows that are shorter by ``less`` where they are padded."""
    rows = [
        tensor if spec.padding is None else _ragged(tensor[:, : tensor.shape[1] - less])
        for tensor, spec in zip(columns.values(), specs, strict=True)
    ]
    as_taken = [replace(spec, scale=None) for spec in specs]  # the example has floats already
    given = model_inputs(rows, as_taken, by_name=by_name)
    try:
        # What the module keeps of this must not be of its caller's inference mode.
        with borrowed_random_numbers(), torch.inference_mode(False), torch.no_grad():
            returned: Any = forward(module, given, as_kwargs=as_kwargs)
    except Exception as error:  # the user's forward may raise anything
        shown = inputs_described(given, specs)
        raise ModelError(
            f"the module fails on the example ({shown}): {message_of(error)}"
        ) from error
    widths = widths_of(returned, _ROWS)
    if not widths:
        if isinstance(returned, Tensor) and form_of(returned):
            pick(returned, None, _ROWS)  # tells what to return instead
        raise ModelError(
            f"the module returns {described(returned)} for {_ROWS} rows: nothing with one or more "
            "values per row. Wrap it in a module that returns such tensors"
        )
    return widths


def _ragged(rows: Tensor) -> Ragged:
    """Rows of equal length, in the form of those of any length."""
    return Ragged(rows.flatten(0, 1), torch.full((len(rows),), rows.shape[1]))


class TorchModel(FittedModel, ChosenOutputs):
    """A trained PyTorch model that adds columns of predictions to a DataFrame.

    Made by ``TorchEstimator.fit``, ``TorchModel.load`` or, from any module, by
    ``TorchModel.from_module``.

    Attributes:
        module: the plain nn.Module, on the CPU and in evaluation mode. ``transform`` predicts with
            it as it is when it is called.
        history: one ``EpochSummary`` per epoch of training.

    A model returned by ``fit`` also has a ``summary`` of that fit, which is not saved.
    """

    @classmethod
    def from_module(
        cls,
        module: nn.Module | ExportedProgram,
        example: Example,
        *,
        loss: Any = None,
        imageCols: Sequence[str] = (),
        imageSize: Sequence[int] | None = None,
        imageFit: str = "crop",
        imageScale: ImageScale | None = None,
        padCols: dict[str, float] | None = None,
        padInputs: dict[str, SequenceInput] | None = None,
        **params: Any,
    ) -> TorchModel:
        """Make a model from a module that was trained elsewhere, to predict with it.

        Args:
            module: any, on the CPU; it is not changed. When the model is saved, it is pickled. A
                ``torch.export`` program needs none of the code that it was written in; dimension 0
                of its tensors must be dynamic.
            example: what the module takes for one row or more, in tensors of shape (rows, ...): one
                tensor, one per argument, or a dict by column name. Each row of a column must have
                its shape there, and becomes a tensor of its dtype.
            loss: what it was trained with. If that is one of torch's for classes, ``outputType``
                can be 'class' or 'probability'; ``lossCol`` needs it.
            imageCols: the columns of images, whose pixels the example holds.
            imageSize: the height and width that images of any size are brought to, as in
                ``TorchEstimator``: those of the example.
            imageFit: how they are: 'crop', 'pad' or 'stretch'.
            imageScale: as what floats the module is given them: '0..1', '0..255' or (mean, std); a
                byte stays the number that it is if this is None.
            padCols: columns of arrays of unequal length, each with the number that shorter rows are
                padded with; the example has rows of one length.
            padInputs: what the module is given after its features for those that are padded, as in
                ``TorchEstimator``; the example leaves them out.
            params: of the model, for example ``featuresCols``, ``featuresAs``, ``outputCols``
                or ``predictionCol``.

        Raises:
            ConfigError: the example or a Param does not fit the module.
            ModelError: the module fails on the example.
        """
        module = as_module(module)
        loss = optional(function("loss", "a function of (outputs, targets)"))(loss)
        made_of = SavedModule(module, module, (), head_of(loss).value, {}, (), loss=loss)
        taking = cls(made_of)
        unknown = [name for name in params if not taking.hasParam(name)]
        if unknown:
            raise ConfigError(
                f"TorchModel has no parameter '{unknown[0]}'. It has: "
                f"{', '.join(param.name for param in taking.params)}"
            )
        if isinstance(example, Mapping):
            params.setdefault("featuresCols", list(example))
        taking._set(**params)
        taken = taking.getFeaturesAs()
        if isinstance(example, Mapping) and taken == "tensor":
            raise ConfigError(
                "the example has names: set featuresAs='dict' or featuresAs='kwargs' to say how "
                "the module takes them"
            )
        features = named_features(example, taking.feature_columns())
        overrides = ColumnOverrides(
            None, None, imageCols or None, imageSize, imageFit, imageScale, padCols, padInputs
        )
        overrides.require_known(list(features))
        specs, by_name = tuple(specs_of(features, overrides)), taken != "tensor"
        if by_name:
            require_distinct(specs)
        widths = output_widths(
            module, features, specs, by_name=by_name, as_kwargs=taken == "kwargs"
        )
        taking._made_of = replace(taking._made_of, features=specs, widths=widths)
        taking.predicted_columns(taking._head, widths)
        return taking

    @jvm_named()
    def transform_volume(
        self,
        source: Place,
        target: Place,
        *,
        patch: Sequence[int],
        overlap: Sequence[int],
        crop: Sequence[int] | None = None,
        chunk: str | Sequence[int] = "auto",
        reduce: str | None = None,
        skip: str | None = "zeros",
        progress: bool = True,
    ) -> VolumeSummary:
        """Predict an array of two or three dimensions, of any size, in chunks, each a Spark task.

        The array, (z, y, x) or (channels, z, y, x), is covered with overlapping patches. Each goes
        through the module as shape ``(1, channels, *patch)``, or several at once, and where they
        overlap their outputs are blended. What the chunks are makes no difference to the result.
        Called again, it computes what is missing and what has changed in the input. Needs
        ``pip install 'sparkdl-torch[volumes]'`` on the driver and the executors.

        Args:
            source: a path that all hosts have, a URL (``s3://``, ``gs://``), or a specification of
                tensorstore, of an array in Zarr 2 or 3, N5 or Neuroglancer's precomputed format.
                Values are converted to the dtype of the module's example, which must hold them,
                and not scaled, unless the model has an ``imageScale``.
            target: likewise, of the output, (channels, z, y, x), float32; with ``reduce="argmax"``
                (z, y, x), an unsigned integer. It must not exist, or be of such a call.
            patch: what the module takes at a time, in voxels by axis, without channels.
            overlap: of neighbouring patches.
            crop: what to leave out on each side of a patch's output, where the module sees too
                little; at the array's edges it is given a mirror image. By default what the module
                leaves out itself.
            chunk: what a task computes, in multiples of the output's blocks. "auto" takes a few
                patches across, and along the first axis as many as leave four chunks for each
                slot. A task's memory grows with a chunk's extent across the first axis.
            reduce: "argmax" to write the index of the largest channel in place of the channels.
            skip: "zeros" to take 0 as the output of a patch that holds only zeros; None to have the
                module compute that too.
            progress: whether to show a bar.

        Returns:
            How many chunks there are, were computed and were skipped, and how fast.

        Raises:
            ConfigError: an argument does not fit, or the target is of another call; before any
                task starts, as far as that can be.
            DataError: an array cannot be read or written, or a number cannot be converted.
            InUseError: another call is writing to the target.
            ModelError: the module fails on a patch, tried first in the driver, or returns what
                cannot be averaged.
            SetupError: tensorstore is not installed.

        Source: Wu et al. 2021, "Chunkflow", Nature Methods.
        """
        from sparkdl.volumes.network import PatchModel
        from sparkdl.volumes.run import transform_volume

        spark = require_session()
        features = self._made_of.features
        if len(features) != 1:
            raise ConfigError(
                f"transform_volume gives the model one tensor, but it takes {len(features)}"
            )
        if self.getOutputType() in ("class", "probability"):
            raise ConfigError(
                f"outputType='{self.getOutputType()}' is for columns. Have the module end with "
                "softmax or sigmoid, or use reduce='argmax'"
            )
        key = self.output_keys().get(self.getPredictionCol())
        predictor = self._predictor((), [features[0].name], spark)
        model = PatchModel(predictor, features[0], key)
        return transform_volume(
            spark,
            self.module,
            model,
            source,
            target,
            patch=patch,
            overlap=overlap,
            crop=crop,
            chunk=chunk,
            reduce=reduce,
            skip=skip,
            progress=progress,
        )
