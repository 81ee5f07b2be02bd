"""Files of tensors: our own reader, the library's, and a worker's state in such a file."""

from __future__ import annotations

import io
import json
import random
import struct

import torch
from torch import nn

from fuzzing.loop import Fault, Target
from fuzzing.mutation import ODD, as_text, mutated, mutated_bytes, mutated_order, number_of_changes
from sparkdl.checkpoint.tensor_file import read_tensors, write_tensors
from sparkdl.worker.state import pack_worker_state, unpack_worker_state

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


class TensorsTarget(Target):
    """A file of tensors of several dtypes, or a worker's state."""

    name = "tensors"
    reads = ("checkpoint/tensor_file.py", "worker/state.py")
    deadline_s = 5.0

    def __enter__(self) -> TensorsTarget:
        file = io.BytesIO()
        tensors = {
            "a": torch.ones(3, 2),
            "b": torch.arange(4),
            "c": torch.zeros(0, 5),
            "d": torch.tensor(True),
            "e": torch.ones(2, dtype=torch.bfloat16),
        }
        write_tensors(file, tensors, {"epoch": "3"})
        self._file = file.getvalue()
        self._optimizer = _optimizer()
        self._state = pack_worker_state(
            self._optimizer, torch.device("cpu"), center_has_optimizer=False
        )
        return self

    def attempt(self, draw: random.Random) -> bool:
        """One file."""
        changes = number_of_changes(draw)
        if draw.random() < 0.5:
            octets = mutated_file(draw, self._file, changes)
            tensors, metadata = read_tensors(io.BytesIO(octets))
            if sum(t.numel() * t.element_size() for t in tensors.values()) > len(octets):
                raise Fault("there are more bytes in the tensors than in the file")
            if not all(isinstance(v, str) for pair in metadata.items() for v in pair):
                raise Fault("there is metadata that is no text")
            return True
        octets = _worker_state(draw, self._state, changes)
        unpack_worker_state(octets, self._optimizer, torch.device("cpu"))
        return True


def _worker_state(draw: random.Random, octets: bytes, changes: int) -> bytes:
    """A worker's state; in half of the cases, what the file says about it is made wrong."""
    if draw.random() < 0.5:
        return mutated_file(draw, octets, changes)
    tensors, metadata = read_tensors(io.BytesIO(octets))
    described = mutated(draw, json.loads(metadata["own"]), changes)
    if draw.random() < 0.3:
        name = draw.choice(list(tensors))
        tensors[name] = draw.choice(
            [
                torch.zeros(0),
                torch.ones(5),
                tensors[name].double(),
                tensors[name][:-1],
                -torch.ones(700),
            ]
            if tensors[name].dim()
            else [torch.zeros(0), torch.ones(5)]
        )
    file = io.BytesIO()
    write_tensors(file, tensors, {"own": as_text(described)})
    return file.getvalue()


def _optimizer() -> torch.optim.Optimizer:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, betas=(0.9, 0.99))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer
