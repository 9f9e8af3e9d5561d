"""Styles: a label in; the colour, the mark and the short name of its spans out."""

from __future__ import annotations

import msgspec

from piper.observe.timeline import MICROBATCH, Label


class Style(msgspec.Struct, frozen=True):
    """One meaning in one colour, the same on paper (web colour) and in a terminal (256 colours);
    the mark stands for a span that has no room for its name."""

    meaning: str
    web: str
    terminal: int
    mark: str


STYLES = {
    "F": Style("forward", "#7da7f0", 111, "F"),
    "B": Style("backward", "#f5a54a", 215, "B"),
    "R": Style("forward that runs again", "#a9c0e8", 146, "f"),
    "BI": Style("input half of a backward", "#4fc4c0", 80, "I"),
    "BW": Style("weight half of a backward", "#86c56b", 114, "W"),
    "F&B": Style("a forward and a backward side by side", "#b491de", 141, "&"),
    "update": Style("update", "#e8d44d", 185, "u"),
    "computation": Style("other computation", "#c5cbd3", 251, "o"),
    "send": Style("send", "#8d99a8", 103, ">"),
    "recv": Style("recv", "#b3a48f", 144, "<"),
    "all_reduce": Style("all_reduce", "#e0736f", 167, "R"),
    "reduce_scatter": Style("reduce_scatter", "#ef9ab8", 211, "S"),
    "all_gather": Style("all_gather", "#a9855f", 137, "G"),
    "all_to_all": Style("all_to_all", "#d05fc3", 170, "A"),
    "shift": Style("shift", "#c9b458", 179, "H"),
    "communication": Style("other communication", "#9a9a9a", 246, "c"),
}
# What memory is for (`plan/memory_ledger.py`), in web colours.
MEMORY_COLORS = {
    "parameters": "#6f9ae0",
    "gradients": "#eda35f",
    "optimizer": "#e3cf5a",
    "saved": "#7fbf8e",
    "gathered": "#b08d68",
    "buffers": "#96a3b3",
    "inside": "#bf9adb",
}
_UPDATES = ("update", "settle")


def style_of(label: Label) -> Style:
    """A computation's colour is that of its phase, a communication's that of its kind."""
    if label.communicates:
        return STYLES.get(label.kind, STYLES["communication"])
    if label.kind in _UPDATES:
        return STYLES["update"]
    return STYLES.get(label.phase, STYLES["computation"])


def short_name(label: Label) -> str:
    """`2F0` for `F[PP=2,MB=0]`; what has no phase of its own is named by its kind."""
    if label.communicates or label.phase not in STYLES or label.microbatch is None:
        return label.kind
    regions = ".".join(str(value) for name, value in label.tags if name != MICROBATCH)
    return f"{regions}{STYLES[label.phase].mark}{label.microbatch}"
