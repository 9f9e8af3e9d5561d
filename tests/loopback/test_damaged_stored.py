"""What damage to checkpoints and weights once led to: each is one error now."""

from __future__ import annotations

import json
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import piper
from piper.errors import FileError
from piper.files import PLAN_LIMIT
from piper.runtime.state.dcp_index import dcp_index
from piper.runtime.state.read_pieces import PieceReader
from piper.runtime.state.weight_sources import weight_source
from piper.stored.manifest import read_manifest
from tests.fuzz_stored import as_others_read, good
from tests.procs import tiny


def _folder(tmp_path: Path, name: str) -> Path:
    for file, data in good()[0][name].items():
        (tmp_path / file).write_bytes(data)
    return tmp_path


def _flipped(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def test_weights_of_a_checkpoint_are_held_to_its_checksums(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "saved")
    job = piper.trace(tiny.model, tiny.batch(), tiny.step).lower(weights=folder)
    with job.launch("single") as run:
        masters = run.masters()
    assert all(masters[name].equal(tensor) for name, tensor in good()[2].items())
    piece = read_manifest(folder).tensors["model.layers.1.weight"].pieces[0]
    data = (folder / piece.file).read_bytes()[piece.offset : piece.offset + piece.length]
    at = data.index(good()[2]["layers.1.weight"][piece.box.start[0]].numpy().tobytes())
    _flipped(folder / piece.file, piece.offset + at)
    with pytest.raises(FileError, match=r"layers\.1\.weight: bytes .* are not those"):
        job.launch("single")


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "not every tensor has a path": lambda m: m["paths"].pop("model.layers.0.bias"),
    "has the path": lambda m: m["paths"].update({"model.layers.0.bias": ["model"]}),
    "is float3": lambda m: m["tensors"]["model.layers.0.bias"].update(dtype="float3"),
    r"is stored in .*file='\.\./x'": lambda m: m["tensors"]["model.layers.0.bias"]["pieces"][
        0
    ].update(file="../x"),
    "is stored in .*start": lambda m: m["tensors"]["model.layers.0.bias"]["pieces"][0][
        "box"
    ].update(start=[3]),
    "of a group that there is not": lambda m: m["group_of"].update({"layers.0.bias": 7}),
    "fewer than 0 steps": lambda m: m.update(steps=-1),
}


@pytest.mark.parametrize("words", CHANGES)
def test_a_manifest_that_contradicts_itself(words: str, tmp_path: Path) -> None:
    folder = _folder(tmp_path, "saved")
    found = json.loads((folder / "piper.json").read_bytes().partition(b"\n")[2])
    CHANGES[words](found)
    _sign(folder, json.dumps(found).encode())
    with pytest.raises(FileError, match=rf"piper\.json is no manifest: .*{words}"):
        read_manifest(folder)


def test_a_manifest_that_is_no_text(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "saved")
    body = (folder / "piper.json").read_bytes().partition(b"\n")[2].removesuffix(b"\n")
    _sign(folder, body.replace(b'"mesh": "', b'"mesh": "\xe4'))
    with pytest.raises(FileError, match=r"piper\.json is no manifest"):
        read_manifest(folder)


def _sign(folder: Path, body: bytes) -> None:
    (folder / "piper.json").write_bytes(b'{"crc": %d}\n' % zlib.crc32(body) + body + b"\n")


def test_metadata_with_a_large_number_of_an_object_takes_no_memory(tmp_path: Path) -> None:
    number = 32 << 20
    (tmp_path / ".metadata").write_bytes(b"\x80\x04}r" + number.to_bytes(4, "little") + b".")
    tracemalloc.start()
    try:
        with pytest.raises(FileError, match="is no metadata of a checkpoint"):
            dcp_index(str(tmp_path))
        assert tracemalloc.get_traced_memory()[1] < PLAN_LIMIT + (8 << 20)
    finally:
        tracemalloc.stop()


def test_a_name_in_a_file_of_torch_that_is_no_text(tmp_path: Path) -> None:
    path = _folder(tmp_path, "torch") / "pytorch_model.bin"
    path.write_bytes(path.read_bytes().replace(b"pytorch_model/v", b"pytorch_mod\xe4l/v"))
    with pytest.raises(FileError, match=r"is no file of torch\.save's present form"):
        weight_source(path)


def test_a_file_of_torch_whose_tensors_lie_in_another_order(tmp_path: Path) -> None:
    """Torch, which loads a part of it without the rest, would take one for the other."""
    path = tmp_path / "weights.pt"
    weights = {"a": torch.ones(4), "b": torch.zeros(4), "again": None}
    weights["again"] = weights["a"]
    torch.save(weights, path)
    assert set(weight_source(path).stored) == {"a", "b", "again"}
    swapped = tmp_path / "swapped.pt"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(swapped, "w") as new:
        entries = {entry.filename: old.read(entry) for entry in old.infolist()}
        zero, one = (next(n for n in entries if n.endswith(f"/data/{key}")) for key in "01")
        for name in entries:
            name = {zero: one, one: zero}.get(name, name)
            new.writestr(name, entries[name])
    loaded = torch.load(swapped, weights_only=True)
    assert loaded["a"].equal(weights["a"]) and loaded["b"].equal(weights["b"])
    with pytest.raises(FileError, match="lie in another order than it names them"):
        weight_source(swapped)


def _rewritten(path: Path, how: str) -> None:
    with zipfile.ZipFile(path) as old:
        entries = {entry.filename: old.read(entry) for entry in old.infolist()}
    if how == "big-endian":
        for name, data in entries.items():
            if name.endswith("/byteorder"):
                entries[name] = b"big"
            if "/data/" in name:
                entries[name] = np.frombuffer(data, np.int32).byteswap().tobytes()
    if how == "another order":
        entries = dict(sorted(entries.items(), key=lambda entry: entry[0], reverse=True))
    kind = zipfile.ZIP_DEFLATED if how == "compressed" else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as new:
        for name, data in entries.items():
            new.writestr(name, data)


@pytest.mark.parametrize("how", ["compressed", "big-endian", "another order"])
def test_the_way_out_of_what_cannot_be_read_in_parts(how: str, tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    weights = {"a": torch.arange(4.0), "b": torch.ones(2)}
    torch.save(weights, path)
    _rewritten(path, how)
    with pytest.raises(FileError, match=how) as refused:
        weight_source(path)
    code, _, words = str(refused.value.legal).partition(" makes it ")
    assert words == "one that can be read"
    exec(code, {"torch": torch, "path": path})
    reader = PieceReader(weight_source(path).stored)
    assert all(torch.equal(reader.tensor(name), weights[name]) for name in weights)


@pytest.mark.parametrize("kind", ["saved", "torch", "shards", "dcp"])
def test_damaged_weights_are_held_to_what_others_read(kind: str, tmp_path: Path) -> None:
    found, wanted = as_others_read(_folder(tmp_path, kind), kind), good()[2]
    assert found is not None and found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
