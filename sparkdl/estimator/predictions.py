"""Which columns ``transform`` adds, and from which outputs, according to the Params."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparkdl.errors import ConfigError, ModelError
from sparkdl.estimator.head import Head, output_function
from sparkdl.outputs import OutputKey, Widths
from sparkdl.spark.inference.predictor import OutputColumn


def predicted_columns(
    keys: Mapping[str, OutputKey | None],
    prediction: str,
    output_type: str,
    head: Head,
    widths: Widths,
) -> list[OutputColumn]:
    """The columns in their order; ``outputType`` applies to ``predictionCol``, others are raw.

    Args:
        keys: the output of each column.
        prediction: the name of ``predictionCol``.
        output_type: what that holds.
        head: what the outputs mean.
        widths: of the model's outputs.

    Raises:
        ConfigError: the model has no such output, or the output cannot be of this type.
    """
    if prediction not in keys and output_type in ("class", "probability"):
        raise ConfigError(
            f"outputType='{output_type}' applies to predictionCol, but outputCols "
            f"({', '.join(keys)}) has no column '{prediction}'. Set predictionCol to one of them"
        )
    columns = []
    for name, key in keys.items():
        if key not in widths:
            known = ", ".join(repr(each) for each in widths if each is not None)
            raise ConfigError(
                f"column '{name}' asks for output {key!r}, but the model's outputs are {known}. "
                f"Choose one with outputCols={{'{name}': ...}}"
                if known
                else f"outputCols has column '{name}', but the model has only one output. Drop "
                "outputCols; predictionCol names its column"
            )
        function, wide = output_function(
            output_type if name == prediction else "raw", head, widths[key]
        )
        columns.append(OutputColumn(name, key, function, wide))
    return columns


def require_any_length(widths: Widths, shorter: Widths, keys: Sequence[OutputKey | None]) -> None:
    """Check that the width of outputs that become columns does not depend on padded lengths.

    Args:
        widths: of the model's outputs for rows of one length.
        shorter: for shorter rows.
        keys: of the outputs.

    Raises:
        ModelError: that of one does.
    """
    for key in keys:
        if key in widths and widths[key] != shorter.get(key):
            name = "" if key is None else f" as its output {key!r}"
            raise ModelError(
                f"the model returns {widths[key]} numbers per row{name} but {shorter.get(key)} "
                "for shorter rows: as many as the longest row of a minibatch has items. A "
                "prediction column needs the same number in every row: return a mean over the "
                "items, or the output of one item, or choose another output with outputCols"
            )
