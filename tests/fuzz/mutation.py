"""Making a good message or file wrong: its fields, types, lengths, order, nesting and bytes."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")

RAW = {
    "@deep": "[" * 100_000 + "]" * 100_000,
    "@open": '{"a":' * 60_000,
    "@digits": "9" * 5_000,
    "@large": "9" * 400,
    "@small": "-" + "9" * 4_000,
    "@surrogate": '"\\ud800"',
    "@twice": '{"rank": 0, "rank": 1}',
    "@infinity": "1e999",
}
"""JSON that ``json.dumps`` never writes, by the text that stands for it."""
ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 255, 256),
    *((1 << 31) - 1, 1 << 31, -(1 << 31), (1 << 63) - 1, 1 << 63, -(1 << 63) - 1, 1 << 64, 1 << 70),
    *(0.5, -0.0, 1e300, -1e300, 5e-324, float("nan"), float("inf"), float("-inf")),
    *("", "x", "x" * 1000, "\x00", "\n\r\x1b[2J", "é\U0001f600", "../../x", "/dev/zero", "."),
    *([], {}, [[]], [[[[]]]], {"": {}}, [None], [0] * 1000, {"a": [{"b": [{}]}]}),
    *RAW,
]
HEADER_ODD = [
    *ODD,
    *("F64", "F8_E4M3", "BOOL", "U64", "F4", [0, 4], [4, 0], [0, 1 << 62], [1 << 40, 1 << 40]),
    *(
        [1 << 31, 1 << 31],
        [1 << 62, 4, 0],
        [1 << 62, 4],
        [0, 1 << 62],
        [-1, -4],
        [1] * 70,
        [0] * 10_000,
    ),
    {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
]
_SIZES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def as_text(value: Any) -> str:
    """The JSON of a value that may contain the names of ``RAW``."""
    text = json.dumps(value)
    if '"@' in text:
        for name, raw in RAW.items():
            text = text.replace(f'"{name}"', raw)
    return text


def mutated(draw: random.Random, value: T, times: int = 1, odd: Sequence[Any] = ODD) -> T:
    """A copy of a JSON value with some of its nodes changed.

    Args:
        draw: the source of chance.
        value: dicts, lists, text, numbers.
        times: the number of changes.
        odd: what may take the place of a node.
    """
    whole = [copy.deepcopy(value)]
    for _ in range(times):
        container, key = draw.choice(_nodes(whole))
        _change(draw, container, key, whole, odd)
    return whole[0]


def _nodes(container: Any) -> list[tuple[Any, Any]]:
    """Every node below a container, as its immediate container and its key there."""
    found: list[tuple[Any, Any]] = []
    keys = list(container) if isinstance(container, dict) else range(len(container))
    for key in keys:
        found.append((container, key))
        if isinstance(container[key], dict | list):
            found += _nodes(container[key])
    return found


def _change(draw: random.Random, container: Any, key: Any, whole: Any, odd: Sequence[Any]) -> None:
    old = container[key]
    kind = draw.randrange(9)
    if kind <= 2:
        container[key] = copy.deepcopy(draw.choice(odd))
    elif kind == 3 and container is not whole:
        del container[key]
    elif kind == 4:
        other, where = draw.choice(_nodes(whole))
        container[key] = copy.deepcopy(other[where])
    elif kind == 5:
        container[key] = [old] if draw.random() < 0.5 else {str(key): old}
    elif kind == 6 and container is not whole:
        new = draw.choice(["", "x", "pickle", "import", f"{key} "])
        if isinstance(container, dict):
            container[new] = container.pop(key) if draw.random() < 0.5 else copy.deepcopy(old)
        else:
            container += [copy.deepcopy(old)] * draw.choice([1, 2, 100])
    else:
        container[key] = _nudged(draw, old)


def _nudged(draw: random.Random, old: Any) -> Any:
    """A neighbouring value of the same type, if the type has such values."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return draw.choice([old + 1, old - 1, -old, old * 1000, old << 32, float(old), str(old)])
    if isinstance(old, float):
        return draw.choice([-old, old * 1e308, old / 3, int(old) if abs(old) < 1e9 else 0])
    if isinstance(old, str):
        at = draw.randrange(len(old) + 1)
        inside = draw.choice(["", "x", ".", ":", "/", "\x00", "é", "0"])
        return old[:at] + inside + old[at + draw.randrange(3) :]
    if isinstance(old, list):
        return draw.choice([old[::-1], old[:-1], old + old, old[1:]])
    if isinstance(old, dict):
        return list(old.values())
    return 0


def mutated_bytes(draw: random.Random, octets: bytes, times: int = 1) -> bytes:
    """A copy of some bytes with bits, numbers or pieces changed."""
    changed = bytearray(octets)
    for _ in range(times):
        at = draw.randrange(len(changed) + 1)
        to = min(len(changed), at + draw.choice([1, 2, 4, 8, 64, 1000]))
        kind = draw.randrange(8)
        if kind == 0:
            del changed[at:]
        elif kind == 1:
            del changed[at:to]
        elif kind == 2:
            changed[at:at] = changed[at:to] or b"\x00"
        elif kind == 3:
            changed[at:to] = draw.randbytes(to - at)
        elif kind == 4:
            changed[at:at] = draw.randbytes(draw.choice([1, 8, 100]))
        elif kind == 5:
            width, order = draw.choice([1, 2, 4, 8]), draw.choice(["big", "little"])
            number = draw.choice(_SIZES) & ((1 << 8 * width) - 1)
            changed[at : at + width] = number.to_bytes(width, order)  # type: ignore[arg-type]
        elif at < len(changed):
            changed[at] ^= 1 << draw.randrange(8)
    return bytes(changed)


def mutated_order(draw: random.Random, items: Sequence[T]) -> list[T]:
    """The items with one left out, repeated, swapped or moved, or the list cut short."""
    changed = list(items)
    if not changed:
        return changed
    at, other = draw.randrange(len(changed)), draw.randrange(len(changed))
    kind = draw.randrange(5)
    if kind == 0:
        del changed[at]
    elif kind == 1:
        changed[at:at] = [changed[at]] * draw.choice([1, 2, 5])
    elif kind == 2:
        changed[at], changed[other] = changed[other], changed[at]
    elif kind == 3:
        changed.insert(at, changed[other])
    else:
        del changed[at:]
    return changed


def number_of_changes(draw: random.Random) -> int:
    """Mostly one, so that reading gets as far as the change; none in one input out of ten."""
    return draw.choice([0, 1, 1, 1, 1, 1, 1, 2, 2, 3])


def mutated_file(draw: random.Random, octets: bytes, changes: int) -> bytes:
    """A safetensors file with its header's fields, order or length, or its bytes, changed."""
    if not changes:
        return octets
    size = struct.unpack("<Q", octets[:8])[0]
    header, body = json.loads(octets[8 : 8 + size]), octets[8 + size :]
    kind = draw.randrange(8)
    if kind <= 4:
        header = mutated(draw, header, changes, HEADER_ODD)
    elif kind == 5:
        body = mutated_bytes(draw, body, changes)
    elif kind == 6:
        header = dict(mutated_order(draw, list(header.items())))
    else:
        return mutated_bytes(draw, octets, changes)
    text = as_text(header).encode()
    return struct.pack("<Q", len(text)) + text + body
