"""Files of `torch.save`: a path in, what is in it out, with tensors that know where their bytes lie."""

from __future__ import annotations

import os
import zipfile
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from piper.errors import FileError

_LEGAL = "a file that torch.save wrote, of tensors in dicts and lists"


def torch_content(path: str) -> Any:
    """What `torch.load` makes of a file, with fake tensors: no tensor's bytes are read."""
    try:
        with zipfile.ZipFile(path) as archive:
            packed = [entry.filename for entry in archive.infolist() if entry.compress_type]
            orders = [name for name in archive.namelist() if name.endswith("/byteorder")]
            little = all(archive.read(name) == b"little" for name in orders)
    except FileNotFoundError:
        raise FileError(f"there is no file {path}") from None
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError) as problem:
        raise FileError(
            f"{path} is no file of torch.save's present form: {problem}",
            legal="torch.save(torch.load(path, weights_only=True), path) makes it one",
        ) from None
    if packed or not little:
        what = f"{packed[0]} in it is compressed" if packed else "its numbers are big-endian"
        raise FileError(f"{path} cannot be read in parts: {what}", legal=_LEGAL)
    try:
        with FakeTensorMode():
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as problem:  # whatever torch says of files that hold more than tensors
        reason = str(problem).partition("\n")[0][:300]
        raise FileError(f"{path} cannot be read: {reason}", legal=_LEGAL) from None


def place_of(tensor: Tensor, name: str, path: str) -> int:
    """The byte of the file where a tensor's first element lies; all others must be in the file, too."""
    begin = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((num - 1) * stride for num, stride in strides)
    size = tensor.element_size()
    if begin is None or tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        raise FileError(f"{name} in {path} is no plain tensor", legal=_LEGAL)
    end = begin + (last + 1) * size if tensor.numel() else begin
    if (last + 1) * size > tensor.untyped_storage().nbytes() or end > os.path.getsize(path):
        raise FileError(f"{path} ends before {name} does", legal="a whole file")
    return int(begin + tensor.storage_offset() * size)
