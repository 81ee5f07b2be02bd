"""Converters of Params that take more than a number, a word or a list of names."""

from __future__ import annotations

import datetime
import difflib
import numbers
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import torch

from sparkdl import large_batches
from sparkdl.arguments import as_list, plain
from sparkdl.callbacks import Callback, EarlyStopping, Hooks, ModelCheckpoint, WorkerCallback
from sparkdl.checkpoint.trust import classes_of
from sparkdl.errors import ConfigError
from sparkdl.metrics import Metrics
from sparkdl.protocols import OptimizerBuilder
from sparkdl.spark.cluster.network import parse_ports
from sparkdl.spark.rows.converters import function, got
from sparkdl.strategies import Strategy

AnyCallback = Callback | WorkerCallback
EXACT = 1 << 53
"""Whole numbers below are the same as float64."""
Label = str | int | float | bool

SEVERAL_OPTIMIZERS = (
    "A training with several optimizers, such as a GAN's, needs a loop of its own: write it as a "
    "function and run it on the workers with sparkdl.run(function)"
)
OPTIMIZER = (
    "a function of the model's parameters, for example partial(torch.optim.SGD, lr=0.1), or the "
    "name of one of torch's, such as 'Adam'"
)
INSTANTS = (
    "their text depends on the session's time zone. Use a date or a string of your own as the "
    "label, for example F.to_date(...) or F.date_format(...)"
)


def loss(value: Any) -> Any:
    """A function, or the model's own."""
    if isinstance(value, str) and value == "model":
        return value
    return function("loss", "a function of (outputs, targets), or 'model' for the model's own")(
        value
    )


def optimizer(value: Any) -> Any:
    """A function that builds one, or a name, which stays one: a search can then be saved."""
    if isinstance(value, (dict, list, tuple)):
        raise ConfigError(f"optimizer must be a single one, got {len(value)}. {SEVERAL_OPTIMIZERS}")
    if isinstance(value, str):
        optimizer_builder(value)
        return value
    return function("optimizer", OPTIMIZER, builds=True)(value)


def optimizer_builder(value: OptimizerBuilder | str) -> OptimizerBuilder:
    """What builds an optimizer, also if it is given by name.

    Names are looked up, never imported: they may come from a saved estimator.

    Raises:
        ConfigError: no optimizer has that name.
    """
    if not isinstance(value, str):
        return value
    known: dict[str, OptimizerBuilder] = {
        name: each
        for package, module in (("torch.optim", torch.optim), ("sparkdl", large_batches))
        for each in classes_of(module, torch.optim.Optimizer).values()
        if each is not torch.optim.Optimizer
        for name in (each.__name__, f"{package}.{each.__name__}")
    }
    if value not in known:
        near = [each for each in known if each.lower() == value.lower()]
        near = near or difflib.get_close_matches(value, known, n=1)
        hint = f". Did you mean '{near[0]}'?" if near else ""
        raise ConfigError(f"optimizer must be {OPTIMIZER}, got {value!r:.100}{hint}")
    return known[value]


def strategy(value: Any) -> Strategy[Any] | dict[str, Any]:
    """An instance of one, or what is to differ in the one that there is."""
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, Strategy):
        raise ConfigError(
            f"strategy must be a strategy such as ParameterAveraging(period=5), got {got(value)}"
        )
    return value


def callbacks(value: Any) -> list[AnyCallback]:
    """A list of instances."""
    wanted = "callbacks must be a list of sparkdl.callbacks.Callback or WorkerCallback"
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{wanted}, got {value!r}")
    for each in value:
        if isinstance(each, type) and issubclass(each, Hooks):
            raise ConfigError(f"{wanted}, but it has the class {each.__name__}: call it")
        if not isinstance(each, AnyCallback):
            raise ConfigError(f"{wanted}, but it has {each!r}")
    _require_one_best(value)
    return list(value)


def _require_one_best(given: Sequence[AnyCallback]) -> None:
    """Check that no two callbacks would have the fit return the models of different epochs.

    Raises:
        ConfigError: the one that was the best last, by whichever, would be returned.
    """
    keep = [
        each
        for each in given
        if isinstance(each, ModelCheckpoint)
        or (isinstance(each, EarlyStopping) and each.restore_best)
    ]
    first = next(iter(keep), None)
    other = next((each for each in keep if first and each.metric != first.metric), None)
    if first is None or other is None:
        return
    raise ConfigError(
        "callbacks must keep the same model, since a fit returns one, but "
        f"{type(first).__name__} keeps the best by '{first.metric}', and {type(other).__name__} "
        f"by '{other.metric}'. Have both follow one of them, leave out a ModelCheckpoint, or set "
        "restore_best=False in an EarlyStopping that is only to end the training"
    )


def metrics(value: Any) -> dict[str, Any]:
    """What makes each metric, by name."""
    return dict(Metrics.of(value).makers)


def ports(value: Any) -> str:
    """Two ports as text."""
    parse_ports("collectivePorts", value)
    return str(value)


def labels(value: Any) -> list[Label]:
    """Check class labels in the order of the model's outputs.

    Returns:
        Texts, numbers or booleans, which a saved model can hold: dates become texts as Spark writes
        them, decimals the nearest floats.

    Raises:
        ConfigError: they are not distinct values of one of these types, or too large.
    """
    found = as_list(value) or []
    if any(isinstance(each, datetime.datetime) for each in found):
        raise ConfigError(f"labels are timestamps, starting with {found[0]!r:.100}: {INSTANTS}")
    given, found = found, [_plain(each) for each in found]
    kinds = [(str,), (bool,), (int, float)]
    alike = any(all(type(each) in kind for each in found) for kind in kinds)
    if len(found) < 2 or not alike or len(set(map(_in_tensor, found))) != len(found):
        raise ConfigError(
            "labels must be two or more different strings, or numbers, booleans or dates, in the "
            f"order of the model's outputs, got {value!r:.200}"
        )
    for each in given:
        # Rows and predictions hold labels as float64, where a neighbour's label would be the same.
        if isinstance(each, (numbers.Integral, Decimal)) and abs(float(each)) >= EXACT:
            raise ConfigError(
                f"labels hold {each}, but rows and predictions hold numeric labels as float64, "
                f"which has not every whole number from 2**53 ({EXACT}) on. Use texts: cast the "
                "label column to string, and give such labels as strings"
            )
    return found


def _plain(label: Any) -> Any:
    if isinstance(label, str):
        return str(label)
    return label.isoformat() if isinstance(label, datetime.date) else plain(label)


def _in_tensor(label: Label) -> str | float:
    """How rows and predictions hold a label; classes must differ in this form."""
    return label if isinstance(label, str) else float(label)
