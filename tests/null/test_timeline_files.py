"""A timeline comes back from its files as it was; a damaged file is one clear error."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from piper.cost.presets import MACHINES
from piper.errors import FileError
from piper.observe.timeline import Column, Label, Timeline, Track
from piper.observe.timeline_files import from_bytes, load_timeline, to_bytes, to_json
from piper.observe.timeline_output import save_timeline
from piper.sim.simulate import simulate
from tests.null.test_simulate import layers_plan


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


def test_the_labels_of_many_ranks_are_little() -> None:
    """Ranks of a class differ in who meets, and in nothing else."""
    plan = layers_plan(4, 8, pp=4, dp=16, schedule="1f1b")
    timeline = simulate(plan, MACHINES["cpu"], by_rank=True)
    data, as_json = to_bytes(timeline), to_json(timeline)
    assert len(timeline.tracks) == 64 and len({t.labels for t in timeline.tracks}) == 64
    bare = len(data) - len(zlib.compress(timeline.plan_json))
    assert bare < 30 * timeline.num_spans, bare / timeline.num_spans
    assert len(as_json) - len(timeline.plan_json) < 100 * timeline.num_spans
    for found in (from_bytes(data), from_bytes(as_json)):
        assert found == timeline
        labels = [label for track in found.tracks for label in track.labels]
        assert len(set(map(id, labels))) == len(set(labels))


def test_meetings_that_only_look_like_those_of_ranks_come_back() -> None:
    names = [
        "x",
        "x@0",
        "x@7",
        "x@07",
        "@7",
        "x@7@8",
        "x@-1",
        "x@",
        "x\n@3",
        "x@9999999999",
        "x@7 ",
    ]
    labels = tuple(Label(f"{i}", "send", "p2p", meeting=name) for i, name in enumerate(names))
    timeline = Timeline("table", [Track("a", (0,), labels), Track("b", (1,), labels[:1])], [])
    for form in (to_bytes, to_json):
        assert from_bytes(form(timeline)) == timeline


@pytest.mark.parametrize("form", [to_bytes, to_json])
def test_a_damaged_file_is_an_error_or_means_what_it_says(
    form: Callable[[Timeline], bytes],
) -> None:
    chance = random.Random(1)
    timeline = _timeline()
    data = form(timeline)
    for size in [*range(0, len(data), 1 + len(data) // 100), len(data) - 1]:
        with pytest.raises(FileError):
            from_bytes(data[:size])
    refused = 0
    for _ in range(600):
        broken = bytearray(data)
        broken[chance.randrange(len(broken))] ^= 1 << chance.randrange(8)
        try:
            found = from_bytes(bytes(broken))
        except FileError:
            refused += 1
        else:
            if form is to_bytes:  # it has sums of its contents
                assert found == timeline
            else:
                _means(found, json.loads(broken))
    assert refused > (590 if form is to_bytes else 150)


def _means(found: Timeline, document: dict[str, Any]) -> None:
    head = document["head"]
    assert list(map(list, found.steps)) == head["steps"]
    for name in ("source", "plan", "clock_error", "unit", "host_computes"):
        assert getattr(found, name) == head[name]
    for track, about, columns in zip(
        found.tracks, head["tracks"], document["columns"], strict=True
    ):
        assert (track.name, list(track.ranks)) == (about["name"], about["ranks"])
        assert track.begins == about["begins"]
        for name in ("which", "issued", "start", "end", "waited"):
            assert list(getattr(track, name)) == columns[name]
        memory = {n: [list(c.times), list(c.nbytes)] for n, c in track.memory.items()}
        assert memory == columns["memory"]
        labels = head["labels"][about["labels"]]
        for label, told in zip(track.labels, labels, strict=True):
            assert all(_same(getattr(label, name), value) for name, value in told.items())


def _same(value: Any, told: Any) -> bool:
    return bool([list(tag) for tag in value] == told if isinstance(value, tuple) else value == told)


def _first(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["columns"][0]
    return found


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "begins beyond": (
        lambda d: d["head"]["tracks"][0].update(begins=[0, 99]),
        "begin at the spans",
    ),
    "begins below": (
        lambda d: d["head"]["tracks"][0].update(begins=[-5, 10]),
        "begin at the spans",
    ),
    "begins late": (lambda d: d["head"]["tracks"][0].update(begins=[1, 10]), "begin at the spans"),
    "begins mixed": (lambda d: d["head"]["tracks"][0].update(begins=[30, 9]), "begin at the spans"),
    "too few steps": (lambda d: d["head"]["tracks"][0].update(begins=[0]), "has 1 steps"),
    "no ranks": (lambda d: d["head"]["tracks"][0].update(ranks=[]), "is of the ranks"),
    "no such rank": (lambda d: d["head"]["tracks"][0].update(ranks=[-1]), "is of the ranks"),
    "a rank twice": (lambda d: d["head"]["tracks"][0].update(ranks=[1]), "also elsewhere"),
    "no list": (lambda d: d["head"]["tracks"][0].update(labels=7), "has no labels"),
    "no label": (lambda d: _first(d)["which"].__setitem__(3, 9), "without a label"),
    "a short column": (lambda d: _first(d)["end"].pop(), "different lengths"),
    "an early end": (lambda d: _first(d)["end"].__setitem__(3, -1.0), "ends before it starts"),
    "a huge time": (lambda d: _first(d)["end"].__setitem__(3, 1e308), "`end`"),
    "a huge wait": (lambda d: d["columns"][1]["waited"].__setitem__(3, -1e300), "`waited`"),
    "a negative wait": (lambda d: d["columns"][1]["waited"].__setitem__(3, -1.0), "less than no"),
    "uneven memory": (lambda d: _first(d)["memory"]["saved"][1].pop(), "2 times of saved, and 1"),
    "mixed memory": (lambda d: _first(d)["memory"]["saved"][0].reverse(), "not in order"),
    "negative memory": (
        lambda d: _first(d)["memory"]["saved"][1].__setitem__(0, -1),
        "less than nothing of saved",
    ),
    "no tracks": (lambda d: (d["columns"].clear(), d["head"]["tracks"].clear()), "without tracks"),
    "a step backwards": (lambda d: d["head"]["steps"][0].reverse(), "a step from 20.0 to 0.0"),
    "apart": (lambda d: d["head"].update(clock_error=-1.0), "clocks that are -1.0 s apart"),
    "a misspelt field": (lambda d: d["head"].update(stepz=1), "unknown field"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_cannot_be_true_is_named(name: str) -> None:
    document = json.loads(to_json(_timeline()))
    damage, told = DAMAGES[name]
    damage(document)
    with pytest.raises(FileError, match=told):
        from_bytes(json.dumps(document, separators=(",", ":")).encode())


def test_a_time_that_is_no_number_is_refused() -> None:
    for name in ("issued", "start", "end", "waited"):
        timeline = _timeline()
        getattr(timeline.tracks[1], name)[5] = float("nan")
        with pytest.raises(FileError, match=f"`{name}`"):
            from_bytes(to_bytes(timeline))


def test_a_part_that_grows_without_end_is_refused() -> None:
    data = to_bytes(_timeline())
    size = int.from_bytes(data[8:16], "little")
    head = zlib.decompress(data[16 : 16 + size])
    bomb = zlib.compress(head + b" " * (300 << 20))
    with pytest.raises(FileError, match="more than 268435456 bytes"):
        from_bytes(data[:8] + len(bomb).to_bytes(8, "little") + bomb + data[16 + size :])


def test_memory_does_not_go_back_in_time() -> None:
    column = Column()
    for time, nbytes in ((0.0, 1), (2.0, 2), (1.0, 3), (2.0, 4)):
        column.set(time, nbytes)
    assert (list(column.times), list(column.nbytes)) == ([0.0, 2.0], [1, 4])


def test_versions_and_missing_files_are_named(tmp_path: Path) -> None:
    data = to_json(_timeline()).replace(b'"version":2', b'"version":7')
    with pytest.raises(FileError, match="a timeline of version 7"):
        from_bytes(data)
    with pytest.raises(FileError, match="cannot be read"):
        load_timeline(tmp_path / "none")


def test_a_directive_is_named_without_its_long_tables() -> None:
    timeline = _timeline()
    table = {f"layers.{i}.weight": i for i in range(4)}
    timeline.directives = (
        "s.mesh(tp=2)",
        "",
        f"s.shard_tensor(where(), params={table}, over='tp')",
    )
    assert timeline.origin(timeline.tracks[0].labels[1]) == (
        "s.shard_tensor(where(), params={...}, over='tp')"
    )
    timeline.directives = (*timeline.directives[:2], "s.shard_tensor(where(), params={'a': 0})")
    assert timeline.origin(timeline.tracks[0].labels[1]).endswith("params={'a': 0})")
