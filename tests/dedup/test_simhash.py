"""SimHash has the bits of its definition, and near texts have near hashes."""

from __future__ import annotations

import unicodedata

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from near_rows import bits_apart

from sparkdl.dedup.hashing import hash_rows
from sparkdl.dedup.texts import simhash

TEXT = (
    "Every executor holds a full replica of the model, and the driver averages the parameters. "
    "Rows flow from the partitions of a table into tensors, and never visit the driver."
)
OTHER = (
    "The harbour was quiet that morning; gulls circled above the nets, and somewhere behind the "
    "warehouses a bell rang twice before the ferry left for the islands."
)


def splitmix(state: int) -> int:
    mask = 2**64 - 1
    state = (state + 0x9E3779B97F4A7C15) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


def by_definition(text: str) -> int | None:
    """One character after another."""
    lowered = "".join(c.lower() for c in unicodedata.normalize("NFKC", text))
    kept = [c if unicodedata.category(c)[0] in "LNM" else " " for c in lowered]
    plain = " ".join("".join(kept).split())
    counts = [0] * 64
    for place in range(len(plain)):
        a, b, c, d = (ord(each) for each in plain[place : place + 4].ljust(4, "\0"))
        piece = splitmix(splitmix(a << 32 | b) ^ (c << 32 | d))
        for bit in range(64):
            counts[bit] += 1 if piece >> bit & 1 else -1
    word = sum(1 << bit for bit, count in enumerate(counts) if count > 0)
    return (word - 2**64 if word >= 2**63 else word) if plain else None


def hashes(*texts: str) -> list[int | None]:
    words, full = simhash(pa.array(texts, pa.string()))
    return [word if each else None for word, each in zip(words.tolist(), full, strict=True)]


@given(st.lists(st.text("abcXYZ 09-_.,äßÉé日本語Ⅷﬁ\n\t\0", max_size=40), max_size=5))
def test_it_is_that_of_its_definition(texts: list[str]) -> None:
    assert hashes(*texts) == [by_definition(each) for each in texts]


def test_a_long_text_is_counted_in_parts() -> None:
    texts = [TEXT * 1_000, "a", OTHER * 200, OTHER]
    assert hashes(*texts) == [by_definition(each) for each in texts]


def test_case_and_punctuation_change_nothing_a_word_little_and_another_text_all() -> None:
    changed = TEXT.replace("averages", "combines")
    words = hashes(TEXT, TEXT.upper().replace(" ", " - "), changed, OTHER)
    same, near, far = bits_apart(words[1:], words[0]).tolist()
    assert (same, near < 10, far > 20) == (0, True, True)


def test_null_and_texts_without_letters_have_no_hash_and_only_these_are_at_fault() -> None:
    words, faults, _ = hash_rows("simhash", pa.array(["a word", None, " ... ", "", "b"]))
    assert [each is None for each in words.to_pylist()] == [False, True, True, True, False]
    said = "it has neither letters nor digits"
    assert faults.to_pylist() == [None, None, said, said, None]
