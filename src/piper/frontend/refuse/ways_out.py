"""Ways out: a line of the user's, or what torch says of it, in; what it does, and what is legal, out."""

from __future__ import annotations

import re
from typing import NamedTuple

NO_DEVICE = "no .cuda() and no device in the model's code: lower(device=...) chooses it"
NO_WRAPPER = "the plain model: replicate(..., zero=0 to 3), or parallel(dp=2, zero=3), does that"
NO_COMMUNICATION = (
    "no communication in the step: losses, metrics and gradients are those of all ranks"
)
NO_NUMBERS = "keep numbers as tensors: no .item(), .tolist() or float()"
AS_METRICS = (
    "`return loss, {name: value}`: records and callbacks=[...] have the loss and the metrics"
)
STEPPED = "return the loss; lower(optimizer=...) makes the optimizer, and every step steps it"

NO_BRANCHES = "which code runs depends on what a tensor holds"
TAKES_NUMBERS = "a number is taken out of a tensor"
DRAWS = "the step decides by itself how random numbers are drawn"
CALLS_BACKWARD = "the step calls backward"
NO_GENERATOR = "no generator inside of the step: lower(seed=...) decides what is drawn"


class WayOut(NamedTuple):
    """What code does that no plan can hold, if that is sure, and what to write in its place."""

    reason: str = ""
    legal: str = ""


# Words of the user's line: a pattern, the reason, and what is legal.
_LINES = (
    (
        r"layer_?drop",
        "chance chooses which layers run",
        "layerdrop=0 in the model's configuration: chance chooses no layers",
    ),
    (
        r"\brandom\.|\brng\.",
        "Python draws a number, which no graph can hold",
        "torch.rand and the like: numbers of torch's are the same everywhere",
    ),
    (r"\btime\.", "the step reads a clock", "no clock inside of the step"),
    (
        r"init_process_group",
        "the code makes a process group",
        "no process group of your own: launch(...) starts ranks and connects them",
    ),
    (
        r"DDP\(|FSDP\(|fully_shard\(|DataParallel\(",
        "the code wraps a model for training on several ranks",
        NO_WRAPPER,
    ),
    (
        r"\bdist\.|distributed\.|all_reduce|all_gather|barrier\(",
        "the step communicates by itself",
        NO_COMMUNICATION,
    ),
    (r"\.cuda\(|device", "", NO_DEVICE),
    (
        r"\bscaler\.",
        "the step scales its loss",
        'the loss itself; precision="bf16" needs no scaling of gradients',
    ),
    (
        r"zero_grad\(|optimi[sz]er\.step\(|\bopt\.step\(",
        "the step calls an optimizer",
        STEPPED,
    ),
    (r"sched\w*\.step\(", "the step calls a scheduler of learning rates", STEPPED),
    (r"accelerator\.backward", CALLS_BACKWARD, "return the loss; the backward is derived from it"),
    (
        r"\bassert\b.*(nan|finite)",
        "an assert reads what a tensor holds",
        'no assert on values: train(..., on_nan="stop") names the first task with a NaN',
    ),
    (
        r"add_scalar|wandb|mlflow|tqdm|\bp?bar\.|\b(self|writer|logger|run)\.log",
        "the step logs, or shows its progress",
        AS_METRICS,
    ),
    (
        r"\bopen\(",
        "the step opens a file",
        "files read where the data is made, and written by callbacks=[...]",
    ),
    (
        r"retain_grad",
        "the step asks for a gradient",
        "no gradients inside of the step; lower(clip=...) has their norm",
    ),
)
# Words of what torch says. Where they may mean several things there is no reason.
_TEXTS = (
    (
        "data-dependent",
        NO_BRANCHES,
        "compute both sides and choose with torch.where; keep numbers as tensors",
    ),
    ("dynamic control flow", NO_BRANCHES, "compute both sides and choose with torch.where"),
    (
        "autograd.grad",
        "a gradient is taken inside of the step",
        "the derivative written out in operators: `step` is differentiated once",
    ),
    ("unbacked symbol", TAKES_NUMBERS, NO_NUMBERS),
    ("tensor.item", TAKES_NUMBERS, NO_NUMBERS),
    ("tolist()", TAKES_NUMBERS, NO_NUMBERS),
    (
        "requires_grad_()",
        "the step asks for a gradient of a tensor that it makes",
        "parameters, made in make_model, for all that gets a gradient",
    ),
    ("backward()", CALLS_BACKWARD, "return the loss; the backward is derived from it"),
    ("manual_seed", DRAWS, "no seed inside of the step: lower(seed=...) decides what is drawn"),
    ("fork_rng", DRAWS, NO_GENERATOR),
    ("generator", "", NO_GENERATOR),
    (
        "sparse tensor",
        "the code makes a sparse tensor",
        "dense tensors, or an index and torch.gather",
    ),
    ("nested_tensor", "the code makes a nested tensor", "padded tensors and a mask"),
    ("torch.jit", "the code calls torch.jit", "the module as it was written, without torch.jit"),
    (
        "pack_padded_sequence",
        "the code packs a padded batch",
        "the padded batch; mask what padding adds to the loss",
    ),
    ("nn.param", "", "parameters and their dtypes made in make_model"),
    ("device", "", NO_DEVICE),
)
# What torch says of code that it does not look into, whatever it does.
_OPAQUE = ("marked as skipped", "builtin operator")


def by_line(line: str) -> WayOut:
    """What is known of a line."""
    return next((WayOut(*way) for pattern, *way in _LINES if re.search(pattern, line)), WayOut())


def by_text(text: str) -> WayOut:
    """What is known of code that torch refuses so."""
    lowered = text.lower()
    return next((WayOut(*way) for word, *way in _TEXTS if word in lowered), WayOut())


def reason_of_refusal(said: str, line: str) -> str:
    """What a line does that no plan can hold; nothing if torch's own words say it best."""
    if found := by_text(said).reason:
        return found
    if any(word in said for word in _OPAQUE):
        return by_line(line).reason or "the line calls code that no graph can hold"
    return ""
