"""The Params of columns, what goes in and what comes out, and of how a model predicts."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.ml.param import Param
from pyspark.ml.param.shared import (
    HasFeaturesCol,
    HasLabelCol,
    HasPredictionCol,
    HasProbabilityCol,
    HasRawPredictionCol,
    HasThresholds,
    HasWeightCol,
)

from sparkdl.encodings.any_size import FITS
from sparkdl.estimator.params.converters import Label, labels
from sparkdl.estimator.params.declaration import (
    Declaration,
    DeclaredParams,
    Default,
    choice,
    flag,
    number,
)
from sparkdl.outputs import OutputKey
from sparkdl.protocols import SequenceInput
from sparkdl.spark.rows import converters as convert
from sparkdl.spark.rows.column_overrides import ImageScale


class InputParams(HasFeaturesCol, HasLabelCol, DeclaredParams, group="Columns"):
    """Which columns the model is given, and what it is trained on or evaluated against."""

    featuresCol: Param[str] = Declaration(
        None,
        "features",
        "the features column: a number, an array of numbers or a vector per row",
        "The model receives shape (rows,) for numbers and (rows, k) for arrays and vectors.",
    )
    featuresCols: Param[list[str] | None] = Declaration(
        convert.names("featuresCols"),
        None,
        "several feature columns, passed to the model as separate arguments; wins over featuresCol",
        "Integers become int64, fractions the dtype of the model's parameters.",
    )
    featuresAs = choice(
        ("tensor", "dict", "kwargs"),
        "how the model takes its features: 'tensor' (each column an argument), 'dict' (one, keyed "
        "by column name) or 'kwargs' (keyword arguments named like the columns)",
    )
    labelCol: Param[str] = Declaration(None, "label", "the label column")
    labelCols: Param[list[str] | None] = Declaration(
        convert.names("labelCols"),
        None,
        "several label columns, passed to the loss as a tuple; wins over labelCol",
    )
    handleInvalid = choice(
        ("error", "keep", "skip"),
        "what to do about rows with NaN or infinity among the features, nulls, or images that "
        "cannot be decoded: 'error', 'keep' or 'skip'",
        "``error`` refuses them; ``keep`` feeds NaN and infinity, and refuses the others; ``skip`` "
        "leaves them all out of ``fit`` and ``evaluate``, which say how many there are, and "
        "``transform`` gives them null predictions.",
    )


class ColumnParams(HasWeightCol, DeclaredParams, group="Columns"):
    """What the columns become."""

    weightCol: Param[str] = Declaration(
        None,
        Default.UNSET,
        "how much each row's loss counts, in any unit: weights are scaled to a mean of 1",
        "A loss of your own must then give one value per row.",
    )
    columnShapes: Param[dict[str, list[int | None]] | None] = Declaration(
        convert.shapes,
        None,
        "the shape of one row by column, where the type does not say; images have [channels, "
        "height, width], padded rows [None, ...]",
        "For nested arrays, binary columns and images.",
    )
    columnDtypes: Param[dict[str, str] | None] = Declaration(
        convert.dtypes,
        None,
        "the tensor's dtype by column, for example 'bfloat16'; for a binary column, also that of "
        "its bytes",
    )
    imageCols: Param[list[str] | None] = Declaration(
        convert.names("imageCols"),
        None,
        "columns of images: encoded ones (BMP, GIF, JPEG, PNG or WebP) in binary columns, decoded "
        "on the workers, or Spark's image structs",
        "Pillow decodes them to uint8; only the first of several frames counts. Needs "
        "``pip install 'sparkdl-torch[images]'``.",
    )
    imageSize: Param[list[int] | None] = Declaration(
        convert.image_size,
        None,
        "the height and width that images of any size are brought to, turned as their EXIF says; "
        "None if all have the shape in columnShapes",
        "They get 3 channels unless columnShapes says [1, ...] or [4, ...].",
        type=Sequence[int] | None,
    )
    imageFit = choice(
        tuple(FITS),
        "how images are brought to imageSize: 'crop' (fill it, and cut off what lies beyond), "
        "'pad' (fit into it, and fill up with black) or 'stretch'",
        "By Pillow's ``ImageOps.fit``, ``ImageOps.pad`` and ``Image.resize``.",
    )
    imageScale: Param[ImageScale | None] = Declaration(
        convert.image_scale,
        None,
        "as what floats a model is given images: '0..1', '0..255', or (mean, std), which each "
        "pixel from 0 to 1 is normalized with; None for bytes",
        "Mean and std are numbers, or lists of one for each channel.",
    )
    padCols: Param[dict[str, float] | None] = Declaration(
        convert.paddings,
        None,
        "columns of arrays of unequal length, each with the number that pads shorter rows to the "
        "longest of their minibatch",
        'For example ``{"tokens": 0}``.',
    )
    padInputs: Param[dict[str, SequenceInput] | None] = Declaration(
        convert.pad_inputs,
        None,
        "what the model is given besides padded features, by column: 'padding_mask', "
        "'attention_mask' or 'lengths'; None for a padding mask of each",
        "A ``padding_mask`` is bool, true at padding; an ``attention_mask`` 1 at values, 0 at "
        "padding. They come after the features; ``{}`` for nothing.",
    )


class ModuleParams(DeclaredParams, group="Workers"):
    """Which code the executors are sent."""

    shipModules = flag(
        True,
        "whether modules of your own that the model and the other Params need, neither installed "
        "nor of the standard library, are sent to the executors",
        "False where the executors have them already.",
    )


class PredictionParams(HasPredictionCol, DeclaredParams, group="Outputs"):
    """The columns that all models may add."""

    predictionCol: Param[str] = Declaration(
        None, "prediction", "the column that the fitted model adds for its predictions"
    )
    lossCol: Param[str | None] = Declaration(
        convert.nonempty_text("lossCol"),
        None,
        "a column with each row's loss, which transform adds to rows that have labels; None for "
        "none",
        "A loss of your own must give one value per row.",
    )


class OutputParams(DeclaredParams, group="Outputs"):
    """Which outputs of a model of any kind become which columns."""

    outputCols: Param[dict[str, OutputKey] | None] = Declaration(
        convert.outputs,
        None,
        "the columns that the model adds if it returns several outputs: from each column's name to "
        "its output's name, or position in a tuple; None for predictionCol alone",
        'For example ``{"prediction": "logits", "embedding": "pooler_output"}``. '
        "``predictionCol`` among them holds what ``outputType`` says, the others the output "
        "unchanged.",
    )
    outputType = choice(
        ("auto", "class", "probability", "raw"),
        "what predictionCol holds: 'class' (index, double), 'probability' (vector), 'raw' (the "
        "model's output: double or vector), or 'auto': class for a classification loss, else raw",
    )


class ClassParams(
    HasRawPredictionCol, HasProbabilityCol, HasThresholds, PredictionParams, group="Outputs"
):
    """The columns, thresholds and labels of a classifier and its model."""

    rawPredictionCol: Param[str] = Declaration(
        None,
        "rawPrediction",
        "the column of the outputs, a vector with a number for each class; empty for none",
    )
    probabilityCol: Param[str] = Declaration(
        None,
        "probability",
        "the column of the probabilities, also a vector; empty for none",
        "There is none for ``MultiMarginLoss``.",
    )
    predictionCol: Param[str] = Declaration(
        None,
        "prediction",
        "the column of the predicted class, a double: its index, with the labels where "
        "IndexToString finds them; or the label itself if ``labels`` are numbers or booleans",
    )
    thresholds: Param[list[float]] = Declaration(
        convert.refusing("thresholds must be a list of finite numbers", convert.numbers),
        Default.UNSET,
        "a number for each class; the class with the largest ratio of probability to threshold "
        "wins. None for the most likely class",
        type=Sequence[float],
    )
    labels: Param[list[Label] | None] = Declaration(
        labels,
        None,
        "the classes' labels, texts, numbers, booleans or dates, in the order of the model's "
        "outputs; None for the indices 0, 1, ..., for what StringIndexer has left in the column, "
        "for false and true, or for all texts or dates that it has, sorted",
        type=Sequence[Label] | None,
    )


class InferenceParams(DeclaredParams, group="Prediction"):
    """How fast and how precisely a model predicts, not what."""

    predictBatchSize = number(
        1,
        1024,  # larger ones gain no speed on CPUs and cost memory
        "rows that go through the model at once when it predicts (>= 1)",
    )
    predictDevice: Param[str] = Declaration(
        convert.device_name("predictDevice"),
        "auto",
        "where the model predicts: auto, cpu, cuda or cuda:N",
    )
    predictPrecision = choice(
        ("own", "bfloat16", "float16"),
        "of the weights and features when the model predicts: 'own' (what they have), or half: "
        "'bfloat16' or 'float16'",
    )
    predictCompiled = flag(
        False,
        "whether each Python process of an executor compiles the model with torch.compile, which "
        "takes it seconds and needs a C++ compiler on the host (on a GPU, Triton too)",
    )
    predictionDtype = choice(
        ("float64", "float32"),
        "of the predictions: 'float64' (double and vectors, as pyspark.ml takes them) or 'float32' "
        "(float and array<float>, which are half as large)",
    )
