"""What is done instead where this Spark lacks a private name."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError
from pyspark import SparkContext

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


def with_fallback(plain: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have a function do the same in plain PySpark where a private name that it uses is missing.

    Args:
        plain: takes the same arguments, and gives the same answer, if more slowly.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except (Py4JJavaError, Py4JNetworkError):  # the name is there: something else is wrong
                raise
            except (AttributeError, TypeError, Py4JError) as error:
                context = SparkContext._active_spark_context
                if context is None or context._jsc is None:  # it was stopped meanwhile
                    raise
                logger.info("%s: this Spark lacks a private name: %s", function.__name__, error)
            answer: R = plain(*args, **kwargs)
            return answer

        return call

    return decorate
