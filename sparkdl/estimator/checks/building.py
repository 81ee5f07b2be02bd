"""The replica that the driver tries out before any worker builds its own."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from pyspark.sql import DataFrame
from torch import nn

from sparkdl.arguments import listed
from sparkdl.errors import ModelError
from sparkdl.estimator.params.converters import SEVERAL_OPTIMIZERS
from sparkdl.estimator.schema import FitSettings, fed_columns
from sparkdl.process.randomness import borrowed_random_numbers
from sparkdl.protocols import UNKNOWN, LossFunction
from sparkdl.replica import Replica
from sparkdl.replica.initial import has_lazy_parameters, initialized
from sparkdl.replica.optimizer_state import NamedParameters, build_optimizer
from sparkdl.user_code.needed_modules import takes_along
from sparkdl.user_code.tracebacks import message_of, text_of
from sparkdl.worker import Job

logger = logging.getLogger(__name__)

SHOW_ZEROS = "Give a function as model that builds it and calls it on a batch of zeros"
_HOW_TO_BUILD = {
    "uninitialized parameter": SHOW_ZEROS,
    # torch cannot copy every instance.
    "deepcopy protocol": "Give a function as model that builds it, instead of an instance",
    r"(?:missing|required).*\blr\b": "Give the optimizer its learning rate with learningRate",
    "process group": "The strategy synchronizes the replicas: remove DistributedDataParallel and "
    "similar wrappers from the model",
}
"""What to pass as model or optimizer if these cannot be built with an error like this."""


@contextmanager
def reported(what: str, advice: str = "") -> Iterator[None]:
    """Report that the user's model, loss or optimizer has failed.

    Args:
        what: what has failed, and on what.
        advice: what helps.

    Raises:
        ModelError: it has.
    """
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # the user's code may raise anything
        known = (say for like, say in _HOW_TO_BUILD.items() if re.search(like, text_of(error)))
        told, advice = message_of(error), advice or next(known, "")
        told = f"{told.removesuffix('.')}. {advice}" if advice else told
        raise ModelError(f"{what}: {told}") from error


def build(job: Job) -> Replica:
    """Build the replica of a job that will be tried out.

    Raises:
        LazyModelError: the model has to see a batch first.
        ModelError: the model or its optimizer cannot be built.
    """

    def checked_model() -> nn.Module:
        module = job.model()
        if not isinstance(module, nn.Module):
            raise ModelError(f"model builds a {type(module).__name__}; it must return an nn.Module")
        if has_lazy_parameters(module):
            raise LazyModelError(module)
        return module

    def checked_optimizer(named_parameters: NamedParameters) -> torch.optim.Optimizer:
        named = list(named_parameters)
        built = build_optimizer(job.optimizer, named)
        if not hasattr(built, "param_groups"):
            raise ModelError(
                f"optimizer builds a {type(built).__name__}; it must return one "
                f"torch.optim.Optimizer. {SEVERAL_OPTIMIZERS}"
            )
        stepped = {each for group in built.param_groups for each in group["params"]}
        if stepped - {parameter for _, parameter in named}:
            raise ModelError(
                f"optimizer builds a {type(built).__name__} of parameters that are not those of "
                "the replica, each of which has its own. Build it from the parameters that it is "
                "given, for example partial(torch.optim.SGD, lr=0.1)"
            )
        if callable(getattr(built, "eval", None)):
            raise ModelError(
                f"optimizer builds a {type(built).__name__}, which has eval(), as schedule-free "
                "optimizers have: it predicts with other parameters than it trains, and a fit "
                "would validate and return those that it trains. Use one without, such as AdamW "
                "with a scheduler, or call its train() and eval() in a loop of your own: write it "
                "as a function and run it on the workers with sparkdl.run(function)"
            )
        return built

    _require_nothing_to_train(job.loss)
    with reported("the model or its optimizer cannot be built"):
        with borrowed_random_numbers(job.seed):
            replica = Replica(
                checked_model(),
                checked_optimizer,
                job.loss,
                clip_norm=job.clip_norm,
                features_as_kwargs=job.features_as_kwargs,
            )
        replica.module.train()
    return replica


def _require_nothing_to_train(loss: LossFunction) -> None:
    own = loss.named_parameters() if isinstance(loss, nn.Module) else ()
    trained = [f"'{name}'" for name, each in own if each.requires_grad]
    if trained:
        raise ModelError(
            f"the loss {type(loss).__name__} has parameters of its own, {', '.join(trained)}, but "
            "only the model's are trained. Make the loss part of the model (loss='model'), or "
            "freeze them with requires_grad=False"
        )


class LazyModelError(ModelError):
    """A model has lazy layers that have not seen a batch."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(
            f"the model has lazy layers that no forward pass has initialized. {SHOW_ZEROS}"
        )
        self.module = module


def warn_of_untrained(model: Any, others: Mapping[str, Any]) -> None:
    """Warn of what would compute with the module that the user gave, which is never trained.

    Args:
        model: as the user gave it; of a function nobody else has what it builds.
        others: what may compute with it, by name; callbacks in the driver need not be picklable.
    """
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    trained = [each for each in parameters if each.requires_grad]
    found = [name for name, each in others.items() if takes_along(each, trained)] if trained else []
    if found:
        logger.warning(
            "what is given as %s refers to the module that is given as model, of which each "
            "replica trains a copy: in every step it sees the values from before the training. The "
            "replica is step.model in a WorkerCallback, and self in the model's forward; a "
            "Callback has the trained model in on_end, as training.model",
            listed(found),
        )


def build_whole(job: Job, settings: FitSettings, frame: DataFrame) -> tuple[Job, Replica]:
    """Build the replica to try out; lazy layers take their shapes from the first row.

    Args:
        job: what is to be trained.
        settings: the estimator's.
        frame: the DataFrame to fit.

    Returns:
        The job, whose model has all of its parameters, and the replica.
    """
    try:
        return job, build(job)
    except LazyModelError as lazy:
        schema, columns = fed_columns(settings, job.loss, frame, lazy.module)
    # Without their own names: ``dropna`` parses them, and they may hold a backtick.
    values_only = [each.expression().alias(f"{at}") for at, each in enumerate(columns)]
    row = frame.select(values_only).dropna().first()
    known = [] if row is None else list(zip(schema.columns, row, strict=True))
    lengths = [len(value) if spec.row_shape == (UNKNOWN,) else None for spec, value in known]
    items = (len(value) for spec, value in known if spec.padding is not None)
    schema = schema if row is None else schema.of_lengths(lengths)
    most = max(items, default=1) or 1
    model = partial(
        initialized, job.model, schema, features_as_kwargs=job.features_as_kwargs, items=most
    )
    whole = replace(job, model=model)
    return whole, build(whole)
