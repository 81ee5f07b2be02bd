"""``TorchModel``: a trained module whose outputs become columns of your choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.export import ExportedProgram

from sparkdl.checkpoint.module_files import SavedModule
from sparkdl.errors import ConfigError
from sparkdl.estimator.fitted import FittedModel
from sparkdl.estimator.head import head_of
from sparkdl.estimator.outputs import ChosenOutputs
from sparkdl.estimator.pretrained import Example, named_features, output_widths, specs_of
from sparkdl.protocols import SequenceInput
from sparkdl.spark.rows.column_overrides import ColumnOverrides, ImageScale, require_distinct
from sparkdl.spark.rows.converters import function, optional
from sparkdl.spark.session.required import jvm_named, require_session
from sparkdl.user_code.exported import as_module

if TYPE_CHECKING:
    from sparkdl.volumes.run import VolumeSummary
    from sparkdl.volumes.store import Place


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
            module: any, on the CPU; it is not changed. When the model is saved, it is pickled
                unless it consists of torch's own layers. A ``torch.export`` program needs none of
                the code that it was written in; dimension 0 of its tensors must be dynamic.
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
