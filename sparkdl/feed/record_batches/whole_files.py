"""Columns of whole files, of which rows only say the paths.

The JVM reads a file at once, but copies it three times until Python has it: 40 KB take it longer
than opening them takes here. So where Spark only lists files (``binaryFile``), the worker opens
them itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import pyarrow as pa

from sparkdl.errors import DataError
from sparkdl.feed.record_batches.parquet_rows import PATH, PIECE_BYTES, path_of

MAX_BYTES = 2**31 - 1
"""Of a file: no array of Java's, and so no row of Spark's, has more."""


class WholeFiles:
    """Reads files.

    Args:
        names: of the columns that are to hold them.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def read(self, places: pa.StructArray) -> Iterator[dict[str, pa.Array]]:
        """Read the files of some rows.

        Args:
            places: structs of ``path``, as Spark's metadata write it.

        Yields:
            The columns of some of the rows at a time, in the order of ``places``.

        Raises:
            DataError: a file cannot be read.
        """
        contents: list[bytes] = []
        size = 0
        for url in places.field(PATH).to_pylist():
            content = self._content(url)
            if contents and size + len(content) > PIECE_BYTES:
                yield self._columns(contents)
                contents, size = [], 0
            contents.append(content)
            size += len(content)
        if contents:
            yield self._columns(contents)

    def _columns(self, contents: list[bytes]) -> dict[str, pa.Array]:
        return dict.fromkeys(self._names, pa.array(contents, pa.binary()))

    def _content(self, url: str) -> bytes:
        try:
            path = Path(path_of(url))
            size = path.stat().st_size
            content = path.read_bytes() if size <= MAX_BYTES else b""
        except OSError as error:
            raise DataError(
                f"{url} could not be read: {error}. Spark found it when the DataFrame was made: "
                "read the folder again if files in it come and go"
            ) from error
        if max(size, len(content)) > MAX_BYTES:
            raise DataError(
                f"{url} has more than {MAX_BYTES:,} bytes, the most that a row may have"
            )
        return content
