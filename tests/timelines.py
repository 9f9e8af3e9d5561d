"""Timelines for tests: two pipeline ranks by hand, and as many random spans as wanted."""

from __future__ import annotations

import random

from piper.observe.timeline import Column, Label, Timeline, Track

DIRECTIVES = ("mesh = s.mesh(pp=2)", 's.split(where(), "MB", 2)', 's.replicate(where(), over="dp")')
STEP = 0.02


def two_ranks() -> Timeline:
    """Two steps. Messages overlap on their stream, and receives begin before their sends."""
    tracks = []
    for rank in range(2):
        labels = [
            Label(
                f"{phase}[PP={rank},MB={mb}]", "run", "compute", phase, (("MB", mb), ("PP", rank))
            )
            for mb in range(2)
            for phase in "FB"
        ]
        for mb in range(2):
            kind = "recv" if rank else "send"
            tags = (("MB", mb), ("PP", rank))
            labels.append(
                Label(f"{kind}>x[MB={mb}]", kind, "p2p", "F", tags, 1, 1 << 20, f"x{mb}", rank == 1)
            )
        labels.append(Label("all_reduce>g", "all_reduce", "dp", origin=2, nbytes=4096, meeting="g"))
        labels.append(Label("update g", "update", "compute"))
        track = Track(f"rank {rank}", (rank,), tuple(labels))
        for step in range(2):
            track.begins.append(len(track))
            origin, late = step * STEP, rank * 0.002
            for index in range(4):
                start = origin + late + index * 0.003
                track.add(index, start - 1e-5, start, start + 0.003)
            for mb in range(2):
                start = origin + (0.0005 if rank else 0.003 + mb * 0.0005)
                track.add(4 + mb, start, start, origin + 0.0045 + mb * 0.0005)
            track.add(6, origin + 0.015, origin + 0.015 + late / 4, origin + 0.017)
            track.add(7, origin + 0.017, origin + 0.017, origin + 0.018)
        for kind in ("saved", "gradients"):
            track.memory[kind] = Column()
            for time in range(5):
                track.memory[kind].set(time * 0.003, (time + 1) << 30)
        tracks.append(track)
    steps = [(step * STEP, step * STEP + 0.018) for step in range(2)]
    return Timeline("simulated", tracks, steps, DIRECTIVES, "abc", 2e-6)


def many(spans: int, *, ranks: int = 4, labels: int = 1000) -> Timeline:
    """Short spans on two streams of every rank, without gaps."""
    chance = random.Random(0)
    known = tuple(
        Label(f"F[PP={i},MB={i % 7}]", "run", "compute", "FB"[i % 2], (("MB", i % 7), ("PP", i)))
        if i % 4
        else Label(f"all_gather.{i}", "all_gather", "dp", origin=2, nbytes=i, meeting=f"g{i}")
        for i in range(labels)
    )
    tracks = []
    for rank in range(ranks):
        track = Track(f"rank {rank}", (rank,), known, begins=[0])
        now = 0.0
        for span in range(spans // ranks):
            end = now + chance.random() * 1e-5
            track.add(span % labels, now, now, end)
            now = end
        tracks.append(track)
    return Timeline("measured", tracks, [(0.0, max(t.last for t in tracks))], DIRECTIVES)
