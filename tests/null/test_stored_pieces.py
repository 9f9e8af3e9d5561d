"""Ranges of elements as boxes, and reading them from files."""

from __future__ import annotations

import io
import math
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piper.errors import FileError
from piper.plan.tensor_parts import Part, all_of
from piper.runtime.state.patch_views import patch_view
from piper.runtime.state.read_pieces import PieceReader
from piper.stored.boxes import Box, boxes_in, overlap, patches_in, runs_in
from piper.stored.stored_pieces import Piece, StoredTensor

SHAPES = st.lists(st.integers(1, 4), max_size=4).map(tuple)


@st.composite
def _boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    start = tuple(draw(st.integers(0, num - 1)) for num in shape)
    pairs = zip(shape, start, strict=True)
    return Box(start, tuple(draw(st.integers(1, num - s)) for num, s in pairs))


def _numbers(box: Box, shape: tuple[int, ...]) -> list[int]:
    """Of the elements of a box, in row-major order."""
    pairs = zip(box.start, box.size, strict=True)
    numbered = torch.arange(math.prod(shape)).view(shape)
    return numbered[tuple(slice(s, s + n) for s, n in pairs)].flatten().tolist()


@given(st.data(), SHAPES)
def test_a_range_is_its_boxes(data: st.DataObject, shape: tuple[int, ...]) -> None:
    box = data.draw(_boxes(shape))
    first = data.draw(st.integers(0, box.num_elements))
    last = data.draw(st.integers(first, box.num_elements))
    parts = list(boxes_in(box, first, last))
    found = [number for part in parts for number in _numbers(part, shape)]
    assert found == _numbers(box, shape)[first:last]
    assert len(parts) <= max(1, 2 * len(shape) - 1)


@given(st.data(), SHAPES)
def test_overlaps_and_runs(data: st.DataObject, shape: tuple[int, ...]) -> None:
    one, other = data.draw(_boxes(shape)), data.draw(_boxes(shape))
    common = overlap(one, other)
    expected = sorted(set(_numbers(one, shape)) & set(_numbers(other, shape)))
    assert (_numbers(common, shape) if common else []) == expected
    runs = list(runs_in(one, shape))
    assert [n for begin, num in runs for n in range(begin, begin + num)] == _numbers(one, shape)


def _written(folder: Path, tensor: torch.Tensor, cuts: list[Box], form: str) -> StoredTensor:
    """A tensor in one file, a piece for each box."""
    data, pieces = b"", []
    file = str(folder / f"file.{form}")
    for box in cuts:
        pairs = zip(box.start, box.size, strict=True)
        part = tensor[tuple(slice(s, s + n) for s, n in pairs)].clone()
        if form == "torch":
            stream = io.BytesIO()
            torch.save(part, stream)
            own = stream.getvalue()
        else:
            own = part.numpy().tobytes()
        pieces.append(Piece(box, file, len(data), len(own), form, zlib.crc32(own)))  # type: ignore[arg-type]
        data += own
    Path(file).write_bytes(data)
    return StoredTensor("float64", tuple(tensor.shape), tuple(pieces))


def _own(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """A rank's own tensor, by its positions along each dim."""
    for dim, spans in enumerate(part.spans):
        positions = [at for start, num in spans for at in range(start, start + num)]
        tensor = tensor.index_select(dim, torch.tensor(positions, dtype=torch.int64))
    return tensor


@st.composite
def _parts(draw: st.DrawFn, shape: tuple[int, ...]) -> Part:
    """Any positions along each dim."""
    spans = []
    for num in shape:
        cuts = sorted(draw(st.sets(st.integers(0, num), min_size=2, max_size=num + 1)))
        pairs = list(zip(cuts[::2], cuts[1::2], strict=False))
        spans.append(tuple((begin, end - begin) for begin, end in pairs))
    return Part(tuple(spans))


@given(st.data(), SHAPES)
def test_any_range_of_any_part_is_its_patches(data: st.DataObject, shape: tuple[int, ...]) -> None:
    part = data.draw(_parts(shape))
    first = data.draw(st.integers(0, part.num_elements))
    last = data.draw(st.integers(first, part.num_elements))
    numbered = torch.arange(math.prod(shape)).view(shape)
    flat = torch.full((last - first,), -1)
    for patch in patches_in(part, first, last):
        view = patch_view(flat, patch)
        assert (view == -1).all(), "twice"
        view.copy_(numbered[patch.box.slices])
    assert torch.equal(flat, _own(numbered, part).flatten()[first:last])
    other = data.draw(_parts(shape))
    mine, theirs = ({*_own(numbered, each).flatten().tolist()} for each in (part, other))
    assert part.meets(other) == bool(mine & theirs)


@pytest.mark.parametrize("form", ["raw", "torch"])
def test_any_range_is_read_from_any_pieces(tmp_path: Path, form: str) -> None:
    tensor = torch.arange(5 * 4 * 3, dtype=torch.float64).view(5, 4, 3)
    cuts = [
        Box((0, 0, 0), (2, 4, 3)), Box((2, 0, 0), (3, 1, 3)), Box((2, 1, 0), (3, 3, 2)),
        Box((2, 1, 2), (3, 3, 1)),
    ]  # fmt: skip
    reader = PieceReader({"w": _written(tmp_path, tensor, cuts, form)})
    parts = (
        all_of((5, 4, 3)),
        Part((((1, 3),), ((1, 2),), ((1, 2),))),
        Part((((0, 2), (3, 1)), ((0, 4),), ((0, 3),))),  # blocks of rows
        Part((((0, 5),), ((0, 1), (2, 1)), ((0, 1), (2, 1)))),  # and of columns, in two dims
    )
    for part in parts:
        flat = _own(tensor, part).flatten()
        for first in range(0, part.num_elements, 5):
            for last in range(first, part.num_elements + 1, 3):
                before = reader.num_bytes
                assert torch.equal(reader.elements("w", part, first, last), flat[first:last])
                if form == "raw":  # no byte more than asked for
                    assert reader.num_bytes - before == 8 * (last - first)
    assert torch.equal(reader.tensor("w"), tensor)


def test_damage_and_holes_are_named(tmp_path: Path) -> None:
    tensor = torch.arange(12, dtype=torch.float64).view(4, 3)
    stored = _written(tmp_path, tensor, [Box((0, 0), (2, 3)), Box((2, 0), (2, 3))], "torch")
    file = Path(stored.pieces[1].file)
    good = file.read_bytes()
    at = stored.pieces[1].offset + stored.pieces[1].length // 2
    file.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    reader = PieceReader({"w": stored})
    part = all_of((4, 3))
    assert torch.equal(reader.elements("w", part, 0, 6), tensor.flatten()[:6])
    with pytest.raises(FileError, match=r"w: bytes .* are not those that were written"):
        reader.elements("w", part, 0, 7)
    file.write_bytes(good[:at])
    with pytest.raises(FileError, match=f"has ended after {at} bytes"):
        reader.elements("w", part, 0, 7)
    file.unlink()
    with pytest.raises(FileError, match="cannot be read: No such file"):
        reader.elements("w", part, 0, 7)
    hole = StoredTensor("float64", (4, 3), stored.pieces[:1])
    file.write_bytes(good)
    with pytest.raises(FileError, match="the files of w lack 3 of 9 elements"):
        PieceReader({"w": hole}).elements("w", part, 0, 9)
