"""The hashes of a DataFrame's rows, computed by its tasks.

SimHash: texts with many pieces in common have hashes with few different bits.

Source: Charikar 2002, "Similarity estimation techniques from rounding algorithms"; Manku, Jain and
Das Sarma 2007, "Detecting near-duplicates for web crawling".

Rows of images as grey ones, and their hashes of 64 bits, by ``imagehash``.

A hash is an int64 whose most significant bit is the first of the 8 x 8, row by row, so that it is
``int(str(imagehash.dhash(image)), 16)`` as a signed number.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparkdl.encodings.any_size import announced, of_struct, upright
from sparkdl.encodings.encoding import binary_bytes
from sparkdl.encodings.images import pillow
from sparkdl.errors import required
from sparkdl.spark.rows.columns import quoted
from sparkdl.user_code.tracebacks import message_of

PIECE = 4
"""Characters of a piece: one of a text, with the three behind it."""
_AT_A_TIME = 1 << 16
"""Pieces whose bits are counted together; 64 bytes each."""
_SPREAD = np.unpackbits(np.arange(256, dtype=np.uint8)).view(np.uint64)
"""Each byte's bits as bytes, the most significant first."""


def not_utf8(texts: pa.Array) -> dict[int, str]:
    """What is wrong with texts that are no UTF-8, by their row; Spark has read them as they are."""
    try:
        texts.validate(full=True)
        return {}
    except pa.ArrowInvalid:
        found = {}
    for row, octets in enumerate(texts.cast(pa.large_binary()).to_pylist()):
        try:
            (octets or b"").decode()
        except UnicodeDecodeError as error:
            place = error.start
            found[row] = f"it is no UTF-8: byte 0x{octets[place]:02x} at position {place}"
    return found


def simhash(texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """The hashes of texts.

    A text is normalised (NFKC) and lowered, and whatever is between letters and digits becomes one
    space. At each of its characters a piece begins, the last ones of which are filled up with
    character 0. A piece has a hash of 64 bits; a bit of the text's hash is 1 if more than half of
    its pieces have it.

    Args:
        texts: string rows, none null, all of them UTF-8.

    Returns:
        The hashes, shape (rows,), int64, and which rows have a letter or digit, bool.
    """
    # Before 26, Arrow's own function leaves NFKC decomposed (apache/arrow#51225).
    normalized = (unicodedata.normalize("NFKC", each) for each in texts.to_pylist())
    plain = pc.utf8_lower(pa.array(normalized, pa.large_string()))
    plain = pc.utf8_trim(pc.replace_substring_regex(plain, r"[^\p{L}\p{N}\p{M}]+", " "), " ")
    lengths = pc.utf8_length(plain).to_numpy(zero_copy_only=False).astype(np.int64)
    end, nothing = (pa.scalar(each, pa.large_string()) for each in ("\0" * (PIECE - 1), ""))
    filled = pc.binary_join_element_wise(plain, end, nothing).cast(pa.large_binary())
    joined = binary_bytes(filled).to_numpy(zero_copy_only=False).tobytes().decode()
    characters = np.frombuffer(joined.encode("utf-32-le"), dtype=np.uint32).astype(np.uint64)
    places, rows = np.flatnonzero(characters), np.repeat(np.arange(len(texts)), lengths)
    ones = np.zeros((len(texts), 64), dtype=np.int64)
    for start in range(0, len(places), _AT_A_TIME):
        part = slice(start, start + _AT_A_TIME)
        octets = _pieces(characters, places[part]).astype(">u8").view(np.uint8).reshape(-1, 8)
        starts = np.flatnonzero(np.diff(rows[part], prepend=-1))
        # Eight bits become eight bytes, in which up to 255 pieces are counted at once.
        runs = np.union1d(starts, np.arange(0, len(octets), 255))
        counts = np.add.reduceat(_SPREAD[octets], runs, axis=0).view(np.uint8)
        first = np.searchsorted(runs, starts)
        ones[rows[part][starts]] += np.add.reduceat(counts, first, axis=0, dtype=np.int64)
    return as_words(2 * ones > lengths[:, None]), lengths > 0


def _pieces(characters: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The hash of the piece at each place, uint64."""
    first, second, third, fourth = (characters[places + offset] for offset in range(PIECE))
    half = _mixed(first << np.uint64(32) | second)
    return _mixed(half ^ (third << np.uint64(32) | fourth))


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """SplitMix64's next output for each state (Steele, Lea and Flood 2014)."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: np.ndarray = mixed ^ (mixed >> np.uint64(31))
    return found


IMAGE_HASHES = {"dhash": "dhash", "ahash": "average_hash", "phash": "phash", "whash": "whash"}
"""By what ``imagehash`` calls each."""
_GROUNDS = np.array([255, 0, 128])
"""Greys that transparent images are laid on; of those with equal contrast, the first."""
_CONTRAST = 64
"""From this difference of greys on, a larger one does not make a ground better."""


def grey_images(rows: pa.Array) -> Iterator[Any]:
    """Each row as an image of Pillow's mode ``L``, upright as its EXIF says, without transparency.

    Args:
        rows: binary rows with a BMP, GIF, JPEG, PNG or WebP each, or Spark's image structs.

    Yields:
        The image; a text that says what is wrong with a row; None for null.

    Raises:
        SetupError: Pillow is not installed.
    """
    library = pillow()
    for row in rows:
        try:
            found = _grey(library, row) if row.is_valid else None
        except Exception as error:  # Pillow raises almost anything for bytes that are no image
            found = message_of(error)
        yield found


def _grey(library: Any, row: Any) -> Any:
    is_struct = pa.types.is_struct(row.type)
    image = of_struct(library, row) if is_struct else announced(library, row.as_buffer())
    return upright(library, image, "L", _ground)


def _ground(image: Any) -> int:
    """The grey from which the visible pixels of an image with alpha differ most."""
    shades = np.array(image.convert("L").histogram(image.getchannel("A")))
    distances = np.abs(_GROUNDS[:, None] - np.arange(256)).clip(max=_CONTRAST)
    return int(_GROUNDS[(distances @ shades).argmax()])


def imagehash() -> Any:
    """The package.

    Raises:
        SetupError: it is not installed.
    """
    with required("hashes of images need imagehash", "dedup"):
        import imagehash as found
    return found


def as_words(bits: np.ndarray) -> np.ndarray:
    """Bits of shape (rows, 64), the most significant first, as int64 of shape (rows,)."""
    return np.packbits(bits, axis=1).view(">u8").astype(np.uint64).view(np.int64).reshape(-1)


HASHES = (*IMAGE_HASHES, "simhash", "given")
NO_TEXT = "it has neither letters nor digits"


def hashes(frame: DataFrame, kind: str, value: str, group: str | None, first: str) -> DataFrame:
    """A row for each, with what it is compared by.

    Args:
        frame: the rows.
        kind: one of ``HASHES``.
        value: the column that is hashed.
        group: the column whose equal values are compared; None for all.
        first: the column of the order.

    Returns:
        Columns ``first``, ``group``, ``word`` (a long; null if there is nothing to compare),
        ``fault`` (what is wrong with a row that cannot be hashed, else null) and ``blank`` (whether
        it is an image of a single grey value).
    """
    rows = frame.select(
        quoted(first).alias("first"),
        (F.lit(0) if group is None else quoted(group)).alias("group"),
        quoted(value).alias("value"),
    )
    if kind == "given":
        fields = ("cast(value as long) as word", "cast(null as string) as fault", "false as blank")
        return rows.selectExpr("first", "group", *fields)
    schema = T.StructType(rows.schema.fields[:2])
    schema = schema.add("word", "long").add("fault", "string").add("blank", "boolean")
    return rows.mapInArrow(partial(hash_batches, kind), schema)


def hash_batches(kind: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Hash the column ``value`` of each batch; the other two stay."""
    for batch in batches:
        columns = [batch.column("first"), batch.column("group")]
        columns += hash_rows(kind, batch.column("value"))
        yield pa.RecordBatch.from_arrays(columns, ["first", "group", "word", "fault", "blank"])


def hash_rows(kind: str, rows: pa.Array) -> tuple[pa.Array, pa.Array, pa.Array]:
    """The columns ``word``, ``fault`` and ``blank`` of rows, as ``hashes`` returns them."""
    faults: list[str | None] = [None] * len(rows)
    blank = np.zeros(len(rows), dtype=bool)
    words, known = np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows), dtype=bool)
    if kind == "simhash":
        known[:] = rows.is_valid().to_numpy(zero_copy_only=False)
        for index, fault in not_utf8(rows).items():
            faults[index], known[index] = fault, False
        words[known], full = simhash(rows.filter(pa.array(known)))
        for index in np.flatnonzero(known)[~full].tolist():
            faults[index], known[index] = NO_TEXT, False
    else:
        bits = []
        for index, image in enumerate(grey_images(rows)):
            if image is None or isinstance(image, str):
                faults[index] = image
            else:
                bits.append(getattr(imagehash(), IMAGE_HASHES[kind])(image).hash.reshape(64))
                known[index], (least, most) = True, image.getextrema()
                blank[index] = least == most
        if bits:
            words[known] = as_words(np.stack(bits))
    return pa.array(words, mask=~known), pa.array(faults, pa.string()), pa.array(blank)


@contextmanager
def persisted(*frames: DataFrame) -> Iterator[None]:
    """Persist frames while the block runs, however it ends."""
    try:
        for frame in frames:
            frame.persist()
        yield
    finally:
        for frame in frames:
            frame.unpersist()
