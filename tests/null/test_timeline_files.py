"""A timeline comes back from its files as it was; a damaged file is one clear error."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from piper.errors import FileError
from piper.observe.timeline import Column, Label, Timeline, Track
from piper.observe.timeline_files import from_bytes, load_timeline, to_bytes, to_json
from piper.observe.timeline_output import save_timeline


def _timeline(spans: int = 40) -> Timeline:
    chance = random.Random(0)
    labels = (
        Label("F[MB=0]", "run", "compute", phase="F", tags=(("MB", 0), ("PP", 1))),
        Label("send.x", "send", "p2p", nbytes=1 << 40, meeting="x", origin=2),
    )
    tracks = []
    for rank in range(3):
        track = Track(f"rank {rank}", (rank,), labels, begins=[0, spans // 2])
        for index in range(spans):
            start = index + chance.random()
            track.add(index % 2, start - 0.1, start, start + chance.random())
        track.waited.extend(chance.random() for _ in range(spans if rank else 0))
        track.memory["saved"] = Column()
        track.memory["saved"].set(0.0, 5)
        track.memory["saved"].set(1.5, 1 << 41)
        tracks.append(track)
    return Timeline(
        "measured", tracks, [(0.0, spans / 2), (spans / 2, spans)], ("s.split(4)",), "abc", 1e-6
    )


@pytest.mark.parametrize("name", ["run.json", "run.timeline"])
def test_a_timeline_comes_back_as_it_was(tmp_path: Path, name: str) -> None:
    timeline = _timeline()
    save_timeline(timeline, tmp_path / name)
    found = load_timeline(tmp_path / name)
    assert found == timeline
    assert found.tracks[0].labels is found.tracks[2].labels
    assert list(found.tracks[1])[3] == timeline.tracks[1][3]
    assert found.tracks[2].step(1) == range(20, 40)


def test_the_compact_form_is_small() -> None:
    timeline = _timeline(10_000)
    assert len(to_bytes(timeline)) < 28 * timeline.num_spans < len(to_json(timeline)) / 2


@pytest.mark.parametrize("form", [to_bytes, to_json])
def test_a_damaged_file_is_an_error_or_the_same(form: object) -> None:
    chance = random.Random(1)
    data = form(_timeline())  # type: ignore[operator]
    refused = 0
    for _ in range(300):
        broken = bytearray(data)
        if chance.random() < 0.5:
            broken = broken[: chance.randrange(len(broken))]
        else:
            broken[chance.randrange(len(broken))] ^= 1 << chance.randrange(8)
        try:
            from_bytes(bytes(broken))
        except FileError:
            refused += 1
    assert refused >= 150


def test_versions_and_missing_files_are_named(tmp_path: Path) -> None:
    data = to_json(_timeline()).replace(b'"version":1', b'"version":7')
    with pytest.raises(FileError, match="a timeline of version 7"):
        from_bytes(data)
    with pytest.raises(FileError, match="cannot be read"):
        load_timeline(tmp_path / "none")
