"""SimHash: texts with many pieces in common have hashes with few different bits.

Source: Charikar 2002, "Similarity estimation techniques from rounding algorithms"; Manku, Jain and
Das Sarma 2007, "Detecting near-duplicates for web crawling".
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparkdl.dedup.image_hashes import as_words
from sparkdl.encodings.encoding import binary_bytes

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
    plain = pc.utf8_lower(pc.utf8_normalize(texts.cast(pa.large_string()), "NFKC"))
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
        found, counts = _ones(_pieces(characters, places[part]), rows[part])
        ones[found] += counts
    return as_words(2 * ones > lengths[:, None]), lengths > 0


def _ones(pieces: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How many pieces of each row have each bit.

    Args:
        pieces: uint64, shape (n,).
        rows: the row of each piece, ascending, shape (n,).

    Returns:
        The rows, shape (m,), and the counts, most significant bit first, shape (m, 64), int64.
    """
    octets = pieces.astype(">u8").view(np.uint8).reshape(-1, 8)
    # Eight bits become eight bytes, in which up to 255 pieces are counted at once.
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    within = np.arange(len(rows)) - np.repeat(starts, np.diff(starts, append=len(rows)))
    runs = np.flatnonzero(within % 255 == 0)
    counts = np.add.reduceat(_SPREAD[octets], runs, axis=0).view(np.uint8).astype(np.int64)
    of_rows = np.flatnonzero(np.diff(rows[runs], prepend=-1))
    return rows[starts], np.add.reduceat(counts, of_rows, axis=0)


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
