"""Files of tensors."""

from __future__ import annotations

import contextlib
import io
import pickle
from fractions import Fraction
from pathlib import Path

import hypothesis.strategies as st
import pytest
import safetensors.torch
import torch
from every_row import every
from hypothesis import given
from safetensors import safe_open
from torch import Tensor, nn

from sparkdl.checkpoint import container
from sparkdl.checkpoint.state_files import STATE, load_state, save_state
from sparkdl.checkpoint.storage import CheckpointStore
from sparkdl.checkpoint.tensor_file import DTYPES, read_tensors, write_tensors
from sparkdl.errors import CheckpointError, ConfigError


def test_modules_optimizers_and_plain_values_come_back(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    path = str(tmp_path / "run")
    assert load_state(path) is None

    values = {"model": model, "optimizer": optimizer, "epoch": 3, "best": [0.5]}
    save_state(CheckpointStore(path, keep_last=1), values)

    state = load_state(path)
    assert (state["epoch"], state["best"]) == (3, [0.5])
    again = nn.Linear(3, 2)
    again.load_state_dict(state["model"])
    assert torch.equal(again.weight, model.weight)
    moments = state["optimizer"]["state"][0]["exp_avg"]
    assert torch.equal(moments, optimizer.state[model.weight]["exp_avg"])


def test_what_only_running_code_could_read_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"fractions\.Fraction.*state_dict"):
        save_state(CheckpointStore(str(tmp_path), keep_last=1), {"loss": Fraction(1, 3)})
    assert list(tmp_path.iterdir()) == []


@every(
    "octets",
    [
        *(b"", b"no file of torch's", b"PK\x03\x04 and no more", pickle.dumps(Fraction(1, 3))),
        *(b"cposix\nsystem\n(Vtouch touched\ntR.", b"\x80\x02]q\x00."),
    ],
)
def test_a_state_that_somebody_else_wrote_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, octets: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    store = CheckpointStore(str(tmp_path / "run"), keep_last=1)
    contents = {STATE: container.Piece("U8", [len(octets)], lambda _: iter([octets]))}
    store.write(contents, {"kind": "state of a training function"})
    with pytest.raises(CheckpointError, match=r"checkpoint-000001.* cannot be read"):
        load_state(str(tmp_path / "run"))
    assert not (tmp_path / "touched").exists()


def test_a_checkpoint_of_another_kind_is_refused(tmp_path: Path) -> None:
    CheckpointStore(str(tmp_path), keep_last=1).write({}, {"kind": "other"})
    with pytest.raises(ConfigError, match=r"not a checkpoint of a training function.*other"):
        load_state(str(tmp_path))


LIBRARY_DTYPES = [
    dtype
    for name, dtype in DTYPES.items()
    if name not in ("C128", "F4_E2M1_X2", "F8_E8M0")  # of which it reads the last from files alone
]


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    octets = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    if dtype is torch.bool:
        return octets.squeeze(-1) > 127
    return octets.view(dtype).squeeze(-1)


def same_bits(mine: Tensor, other: Tensor) -> bool:
    octets = [t.contiguous().view(-1).view(torch.uint8) for t in (mine, other)]
    return mine.dtype == other.dtype and mine.shape == other.shape and torch.equal(*octets)


def tensors_of(dtypes: list[torch.dtype]) -> st.SearchStrategy[dict[str, Tensor]]:
    return st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        st.builds(
            tensor_of,
            st.sampled_from(dtypes),
            st.lists(st.integers(0, 4), max_size=3).map(tuple),
            st.integers(0, 9),
        ),
        max_size=5,
    )


tensors = tensors_of(list(DTYPES.values()))


def written(values: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    file = io.BytesIO()
    write_tensors(file, values, metadata)
    return file.getvalue()


def require_same(found: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    assert found.keys() == values.keys()
    assert all(same_bits(found[name], values[name]) for name in values)


@given(tensors, st.dictionaries(st.text(max_size=4), st.text(max_size=9), max_size=2))
def test_what_is_written_is_read(values: dict[str, Tensor], metadata: dict[str, str]) -> None:
    found, found_metadata = read_tensors(io.BytesIO(written(values, metadata)))
    assert found_metadata == metadata
    require_same(found, values)


@given(tensors_of(LIBRARY_DTYPES))
def test_the_library_reads_what_is_written_and_what_it_writes_is_read(
    values: dict[str, Tensor],
) -> None:
    require_same(safetensors.torch.load(written(values)), values)
    octets = safetensors.torch.save({name: t.contiguous() for name, t in values.items()})
    require_same(read_tensors(io.BytesIO(octets))[0], values)


def test_the_library_sees_the_metadata(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(written({"a": torch.ones(2)}, {"epoch": "3"}))
    with safe_open(tmp_path / "file", "pt") as file:
        assert file.metadata() == {"epoch": "3"}


@every(
    "values",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.complex(torch.arange(3.0), torch.ones(3)).conj(),
        torch.complex(torch.arange(3.0), torch.ones(3)).conj().imag,
        torch.complex(torch.zeros(1), torch.ones(1)).conj().imag,
        torch.arange(4.0)[::2][1:],
    ],
)
def test_a_view_is_written_as_it_looks(values: Tensor) -> None:
    found, _ = read_tensors(io.BytesIO(written({"a": values})))
    assert torch.equal(found["a"], values)


def test_large_tensors_are_written_and_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "BLOCK_BYTES", 10)
    values = {"a": torch.arange(33.0), "b": torch.arange(7)}
    found, _ = read_tensors(io.BytesIO(written(values)))
    assert all(torch.equal(found[name], values[name]) for name in values)


@given(tensors.filter(bool), st.data())
def test_a_file_cut_short_is_damaged(values: dict[str, Tensor], data: st.DataObject) -> None:
    octets = written(values)
    length = data.draw(st.integers(0, len(octets) - 1))
    with pytest.raises(CheckpointError):
        read_tensors(io.BytesIO(octets[:length]))


def test_bytes_after_the_last_tensor_are_damage() -> None:
    with pytest.raises(CheckpointError, match="bytes follow"):
        read_tensors(io.BytesIO(written({"a": torch.ones(2)}) + b"x"))


@given(tensors, st.data())
def test_a_changed_header_is_an_error_of_ours_or_harmless(
    values: dict[str, Tensor], data: st.DataObject
) -> None:
    octets = bytearray(written(values))
    stop = 8 + int.from_bytes(octets[:8], "little")
    octets[data.draw(st.integers(0, stop - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CheckpointError):
        read_tensors(io.BytesIO(bytes(octets)))


@every("length", [0, 2**63, 2**64 - 1])
def test_no_memory_is_taken_for_an_absurd_header(length: int) -> None:
    with pytest.raises(CheckpointError):
        read_tensors(io.BytesIO(length.to_bytes(8, "little") + b"{}"))


def with_header(header: bytes, rest: bytes) -> io.BytesIO:
    return io.BytesIO(len(header).to_bytes(8, "little") + header + rest)


def test_no_memory_is_taken_for_a_tensor_that_the_header_makes_up() -> None:
    entry = b'{"a":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4]}}'
    with pytest.raises(CheckpointError, match="a size that does not match its shape"):
        read_tensors(with_header(entry, b"1234"))


@every(
    "header",
    [
        b"[" * 100_000,
        b'{"__metadata__":' + b"[" * 100_000,
        b'{"__metadata__":["own"]}',
        b'{"__metadata__":{"own":7}}',
        b'{"__metadata__":5}',
        b'{"a":{"dtype":["F32"],"shape":[1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"U8","shape":[1000000000000000],"data_offsets":[0,1000000000000000]}}',
        b'{"a":{"dtype":"U8","shape":[0,' + b"9" * 40 + b'],"data_offsets":[0,0]}}',
        b'{"a":{"dtype":"F32","shape":[4611686018427387904,4,0],"data_offsets":[0,0]}}',
        b'{"a":{"dtype":"F32","shape":[1180591620717411303424,0],"data_offsets":[0,0]}}',
    ],
)
def test_a_header_that_says_anything_is_an_error_of_ours(header: bytes) -> None:
    for rest in (b"", b"1234"):
        with pytest.raises(CheckpointError):
            read_tensors(with_header(header, rest))


def test_a_dtype_that_the_format_lacks_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"'a' is torch\.bits8"):
        written({"a": torch.zeros(2, dtype=torch.bits8)})
