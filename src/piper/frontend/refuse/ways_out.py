"""Ways out: a line of the user's, or what torch says of it, in; what to write in its place out."""

from __future__ import annotations

import re

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

# Words of the user's line.
_LINES = (
    (r"layer_?drop", "layerdrop=0 in the model's configuration: chance chooses no layers"),
    (r"\brandom\.|\brng\.", "torch.rand and the like: numbers of torch's are the same everywhere"),
    (r"\btime\.", "no clock inside of the step"),
    (
        r"init_process_group",
        "no process group of your own: launch(...) starts ranks and connects them",
    ),
    (r"DDP\(|FSDP\(|fully_shard\(|DataParallel\(", NO_WRAPPER),
    (r"\bdist\.|distributed\.|all_reduce|all_gather|barrier\(", NO_COMMUNICATION),
    (r"\.cuda\(|device", NO_DEVICE),
    (r"\bscaler\.", 'the loss itself; precision="bf16" needs no scaling of gradients'),
    (r"zero_grad\(|optimi[sz]er\.step\(|\bopt\.step\(|sched\w*\.step\(", STEPPED),
    (r"accelerator\.backward", "return the loss; the backward is derived from it"),
    (
        r"\bassert\b.*(nan|finite)",
        'no assert on values: train(..., on_nan="stop") names the first task with a NaN',
    ),
    (r"add_scalar|wandb|mlflow|tqdm|\bp?bar\.|\b(self|writer|logger|run)\.log", AS_METRICS),
    (r"retain_grad", "no gradients inside of the step; lower(clip=...) has their norm"),
)
# Words of what torch says.
_TEXTS = (
    ("data-dependent", "compute both sides and choose with torch.where; keep numbers as tensors"),
    ("dynamic control flow", "compute both sides and choose with torch.where"),
    ("autograd.grad", "the derivative written out in operators: `step` is differentiated once"),
    ("unbacked symbol", NO_NUMBERS),
    ("tensor.item", NO_NUMBERS),
    ("tolist()", NO_NUMBERS),
    ("requires_grad_()", "parameters, made in make_model, for all that gets a gradient"),
    ("backward()", "return the loss; the backward is derived from it"),
    ("manual_seed", "no seed inside of the step: lower(seed=...) decides what is drawn"),
    ("fork_rng", "no generator inside of the step: lower(seed=...) decides what is drawn"),
    ("generator", "no generator inside of the step: lower(seed=...) decides what is drawn"),
    ("sparse tensor", "dense tensors, or an index and torch.gather"),
    ("nested_tensor", "padded tensors and a mask"),
    ("torch.jit", "the module as it was written, without torch.jit"),
    ("pack_padded_sequence", "the padded batch; mask what padding adds to the loss"),
    ("nn.param", "parameters and their dtypes made in make_model"),
    ("device", NO_DEVICE),
)


def by_line(line: str) -> str:
    """What to write in place of a line; nothing if nothing is known of it."""
    return next((advice for pattern, advice in _LINES if re.search(pattern, line)), "")


def by_text(text: str) -> str:
    """What to write in place of what torch refuses so."""
    lowered = text.lower()
    return next((advice for word, advice in _TEXTS if word in lowered), "")
