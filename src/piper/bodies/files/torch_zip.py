"""Files of `torch.save`: a path in, what is in it out, with tensors that know where their bytes lie."""

from __future__ import annotations

import io
import os
import zipfile
from typing import IO, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from piper.bodies.files.storage_order import storage_order
from piper.errors import FileError

_LEGAL = "a file that torch.save wrote, of tensors in dicts and lists"
_ANEW = "torch.save(torch.load(path, weights_only=True), path) makes it one that can be read"
_PART = "a part as torch.distributed.checkpoint.save writes it"


def torch_content(path: str) -> Any:
    """What `torch.load` makes of a file, with fake tensors: no tensor's bytes are read."""
    try:
        return _content(path, path)
    except FileNotFoundError:
        raise FileError(f"there is no file {path}") from None


def torch_part(path: str, offset: int, length: int) -> Any:
    """The same of what `torch.save` wrote into a part of a file."""
    try:
        with open(path, "rb") as file:
            return _content(_Part(file, offset, length), path)
    except OSError as problem:
        raise FileError(f"{path} cannot be read: {problem.strerror or problem}") from None


class _Part(io.RawIOBase):
    """Some bytes of a file as if they were all of one."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        self.file, self.offset, self.length, self.at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self.at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.length}[whence]
        return self.at

    def readinto(self, into: Any, /) -> int:
        self.file.seek(self.offset + self.at)
        data = self.file.read(max(0, min(len(into), self.length - self.at)))
        into[: len(data)] = data
        self.at += len(data)
        return len(data)


def _content(file: Any, path: str) -> Any:
    legal = _ANEW if isinstance(file, str) else _PART
    try:
        with zipfile.ZipFile(file) as archive:
            packed = [entry.filename for entry in archive.infolist() if entry.compress_type]
            orders = [name for name in archive.namelist() if name.endswith("/byteorder")]
            little = all(archive.read(name) == b"little" for name in orders)
            in_order = _in_order(archive)
    except FileNotFoundError:
        raise
    except Exception as problem:  # whatever damaged bytes lead to
        raise FileError(
            f"{path} is no file of torch.save's present form: {problem}",
            legal=legal,
        ) from None
    if packed or not little or not in_order:
        what = "its tensors lie in another order than it names them"
        if packed or not little:
            what = f"{packed[0]} in it is compressed" if packed else "its numbers are big-endian"
        raise FileError(f"{path} cannot be read in parts: {what}", legal=legal)
    if not isinstance(file, str):
        file.seek(0)
    try:
        with FakeTensorMode():
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as problem:  # whatever torch says of files that hold more than tensors
        reason = str(problem).partition("\n")[0][:300]
        raise FileError(f"{path} cannot be read: {reason}", legal=_LEGAL) from None


def _in_order(archive: zipfile.ZipFile) -> bool:
    """Whether storages lie in the order in which the pickle names them: for fake tensors, torch takes
    that for granted where a file says how it was written."""
    entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
    names = [entry.filename for entry in entries]
    pickles = [name for name in names if name.endswith("/data.pkl")]
    if not pickles or not any(name.endswith("/.format_version") for name in names):
        return True
    folder = pickles[0].removesuffix("data.pkl") + "data/"
    lie = [name.removeprefix(folder) for name in names if name.startswith(folder)]
    return storage_order(archive.read(pickles[0])) == lie


def place_of(tensor: Tensor, name: str, path: str, *, offset: int = 0) -> int:
    """The byte of the file where a tensor's first element lies; all others must be in the file, too.
    What `torch.save` wrote begins at `offset`."""
    begin = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((num - 1) * stride for num, stride in strides)
    size = tensor.element_size()
    if begin is None or tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        raise FileError(f"{name} in {path} is no plain tensor", legal=_LEGAL)
    begin += offset
    end = begin + (last + 1) * size if tensor.numel() else begin
    if (last + 1) * size > tensor.untyped_storage().nbytes() or end > os.path.getsize(path):
        raise FileError(f"{path} ends before {name} does", legal="a whole file")
    return int(begin + tensor.storage_offset() * size)
