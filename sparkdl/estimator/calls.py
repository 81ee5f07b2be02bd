"""How a model was called, told where it may be that which it could not take."""

from __future__ import annotations

import inspect

from sparkdl.losses import ModelLoss
from sparkdl.protocols import Batch
from sparkdl.replica import Replica


def how_called(replica: Replica, batch: Batch, error: Exception, *, with_labels: bool) -> str:
    """The call and what the model takes, as an error's last sentences; of other errors nothing.

    Args:
        replica: whose model it is.
        batch: what it was called with.
        error: what it raised.
        with_labels: whether it was given the labels for a loss of its own.
    """
    if not isinstance(error, (TypeError, AttributeError)):
        return ""
    features, advice = batch.features, ""
    if not isinstance(features, dict):
        given = ["..." for _ in features]
    elif replica.features_as_kwargs:
        given = [f"{name}=..." for name in features]
    else:
        given = [f"{{{', '.join(f'{name!r}: ...' for name in features)}}}"]
        advice = (
            ". Leave featuresAsDict out to give it the features as separate arguments, or set "
            "featuresAsKwargs instead to give them by name"
        )
    if with_labels and isinstance(replica.loss, ModelLoss):
        given += [f"{name}=..." for name in replica.loss.keywords]
    try:
        taken = inspect.signature(replica.module.forward).parameters
        takes = f", and its forward takes ({', '.join(taken)})"
    except (TypeError, ValueError):  # a callable written in C may not say what it takes
        takes = ""
    return f". It was called as model({', '.join(given)}){takes}{advice}"
