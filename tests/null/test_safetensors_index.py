"""Headers of safetensors files: data that may be anything; and indexes that name files."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from piper.errors import FileError
from piper.runtime.state.weight_sources import weight_source
from piper.stored.safetensors_index import file_index


def _file(folder: Path, header: Any, data: bytes = b"\0" * 64) -> str:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "any.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return str(path)


def _entry(**more: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **more}


def test_a_good_file(tmp_path: Path) -> None:
    path = _file(tmp_path, {"__metadata__": {"format": "pt"}, "w": _entry()})
    tensor = file_index(path)["w"]
    assert (tensor.dtype, tensor.shape) == ("float32", (2, 2))
    assert tensor.pieces[0].length == 16


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"no json",
        b"[" * 100_000,
        b"[]",
        b'{"w": 3}',
        b'{"w": {}}',
        b"\xff\xfe",
        {"w": _entry(dtype="F31")},
        {"w": _entry(dtype=7)},
        {"w": _entry(shape=[2, 3])},
        {"w": _entry(shape=[-2, -2])},
        {"w": _entry(shape=[1] * 65, data_offsets=[0, 4])},
        {"w": _entry(shape=[2**62, 4], data_offsets=[0, 16])},
        {"w": _entry(shape=[10**40])},
        {"w": _entry(shape="22")},
        {"w": _entry(data_offsets=[-16, 0])},
        {"w": _entry(data_offsets=[16, 0])},
        {"w": _entry(data_offsets=[56, 72])},
        {"w": _entry(data_offsets=[0])},
        {"w": _entry(data_offsets=[0, 2**70])},
    ],
    ids=str,
)
def test_bad_headers_are_one_error(header: Any, tmp_path: Path) -> None:
    path = _file(tmp_path, header)
    with pytest.raises(FileError, match=r"any\.safetensors"):
        file_index(path)


@pytest.mark.parametrize(
    "data", [b"", b"\1\0\0", b"\xff" * 8, (10**8 + 1).to_bytes(8, "little") + b"{}"], ids=str
)
def test_bad_lengths_are_one_error(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(FileError, match="is no safetensors file"):
        file_index(str(tmp_path / "x.safetensors"))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 255), st.integers(0, 10_000))
def test_damaged_files_are_refused_or_fit(at: int, byte: int, end: int) -> None:
    data = bytearray(save({"a": torch.zeros(3, 2), "b": torch.zeros(5, dtype=torch.int64)}))
    data[at % len(data)] = byte
    data = data[: max(len(data) - end % 40, 0)]
    path = f"/dev/shm/piper-damaged-{os.getpid()}.safetensors"
    Path(path).write_bytes(data)
    try:
        found = file_index(path)
    except FileError:
        return
    finally:
        os.unlink(path)
    for tensor in found.values():
        for piece in tensor.pieces:
            assert 0 <= piece.offset <= piece.offset + piece.length <= len(data)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (b"{}", "is no index of weights"),
        (b'{"weight_map": {"w": "../secret"}}', "names a file '../secret'"),
        (b'{"weight_map": {"w": "/etc/passwd"}}', "names a file '/etc/passwd'"),
        (b'{"weight_map": {"w": "none.safetensors"}}', "there is no file"),
        (b'{"weight_map": {"v": "any.safetensors"}}', r"any.safetensors has no v"),
        (b"[" * 10_000, "is no index of weights"),
    ],
)
def test_bad_indexes(index: bytes, words: str, tmp_path: Path) -> None:
    _file(tmp_path, {"w": _entry()})
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(FileError, match=words):
        weight_source(tmp_path)


class _Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("/tmp/piper-was-here",)


def test_pickles_do_nothing(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Evil()))
    with pytest.raises(
        FileError, match=r"is no metadata of a checkpoint: it asks for posix\.mkdir"
    ):
        weight_source(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"nonsense")
    with pytest.raises(FileError, match="is no metadata of a checkpoint"):
        weight_source(tmp_path)
    torch.save({"w": torch.zeros(2), "evil": _Evil()}, tmp_path / "evil.pt")
    with pytest.raises(FileError, match=r"evil\.pt cannot be read"):
        weight_source(tmp_path / "evil.pt")
    torch.save([torch.zeros(2)], tmp_path / "list.pt")
    with pytest.raises(FileError, match="has no tensors by name"):
        weight_source(tmp_path / "list.pt")
    old = tmp_path / "old.pt"
    torch.save({"w": torch.zeros(2)}, old, _use_new_zipfile_serialization=False)
    with pytest.raises(FileError, match=r"is no file of torch.save's present form"):
        weight_source(old)
    good = tmp_path / "good.pt"
    torch.save({"w": torch.zeros(2)}, good)
    good.write_bytes(good.read_bytes()[:-30])
    with pytest.raises(FileError, match=r"is no file of torch.save's present form"):
        weight_source(good)
    assert not os.path.exists("/tmp/piper-was-here")
