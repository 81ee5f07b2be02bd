"""A DataFrame's rows for the workers of a function."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from pyspark.sql import DataFrame

from sparkdl.errors import DataError
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.feed.feed import FeedOptions
from sparkdl.spark.cluster.gpus import ranks_a_task
from sparkdl.spark.cluster.network import network_of
from sparkdl.spark.functions.task import Feeding
from sparkdl.spark.launch.worker_rows import Workers
from sparkdl.spark.rows.column_overrides import ColumnOverrides, require_distinct
from sparkdl.spark.rows.columns import input_columns
from sparkdl.spark.session.encryption import keeps_rows_in_memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rows:
    """A DataFrame for the workers, and what they do with it.

    Attributes:
        workers: says where its rows are read.
        feeding: says how the workers feed them.
    """

    workers: Workers
    feeding: Feeding


def rows_of(
    df: DataFrame,
    overrides: ColumnOverrides,
    num_workers: int,
    device: str,
    *,
    shuffle: str,
    seed: int,
    store_in: str,
    group_by_length: bool,
) -> Rows:
    """Inspect the DataFrame that ``sparkdl.run`` was given; see there for the arguments.

    Raises:
        DataError: it has no columns, or one cannot become a tensor.
    """
    columns = tuple(input_columns(df, df.columns, "df"))
    if not columns:
        raise DataError("df has no columns: there is nothing to feed")
    overrides.require_known(df.columns)
    specs = tuple(overrides.spec(column, torch.float32) for column in columns)
    require_distinct(specs)
    for column, spec in zip(columns, specs, strict=True):
        logger.info("column '%s' (%s) becomes %s", column.name, column.type_name, spec.dtype)
    workers = Workers(
        frame=df,
        columns=columns,
        num_workers=num_workers,
        shuffle=shuffle,
        device=device,
        description="",
        network=network_of(df.sparkSession),
        store_in=store_in,
        ranks_a_task=ranks_a_task(df.sparkSession, device),
    )
    feeding = Feeding(
        schema=FeedSchema(specs, label=(), by_name=True),
        seed=seed,
        options=FeedOptions(
            exchange_rows=workers.exchanged,
            group_by_length=group_by_length,
        ),
        in_memory=keeps_rows_in_memory(df.sparkSession, store_in),
    )
    return Rows(workers, feeding)
