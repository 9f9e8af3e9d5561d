"""Nodes: computation (Chunk, Accumulate, Update), communication (Comm) and host reads (Read)."""

from __future__ import annotations

from typing import Literal

import msgspec

from piper.ir.layouts import Layouts
from piper.ir.values import Shares
from piper.mesh import Group, Slice

Phase = Literal["F", "B", "BI", "BW", "R"]  # R is a forward that runs again for a backward
PHASES: tuple[Phase, ...] = ("F", "B", "BI", "BW")  # that selectors name
Again = Literal["", "expensive", "pieces", "nothing"]  # what is kept where code runs again
CommKind = str  # a row of `ir/communication.py`
Tags = tuple[tuple[str, int], ...]

TRACED = -1  # origin of what no directive made
COMPUTE = "compute"  # the stream of all computation
ONCE = 0  # of what happens every so many microbatches: once a step


class Owner(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which directive, `how`, is responsible for an axis of a node's slice, what the ranks of the axis
    share, and on which stream they talk.

    `zero` says how much of the state of parameters is cut into parts along the axis, in buckets of
    about `bucket_size` bytes. Gradients that are kept in parts are reduced after every `reduce_every`
    microbatches; a bucket that is gathered for its use may start `prefetch` chunks ahead, and stays for
    `reuse` uses. Both are once a step where they are ONCE, and not decided where they are None.
    Memory is planned for `max_load` times an even share of rows.
    """

    axis: str
    how: str
    shares: Shares
    stream: str
    origin: int
    bucket_size: int | None = None
    zero: int = 0
    prefetch: int = 1
    reduce_every: int | None = ONCE
    reuse: int | None = 1
    gather_stream: str = ""
    max_load: float = 1.0


class _Node(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag_field="kind"):
    name: str
    tags: Tags = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    slice: Slice | None = None
    stream: str = COMPUTE
    origin: int = TRACED

    def tag(self, name: str) -> int | None:
        for key, value in self.tags:
            if key == name:
                return value
        return None


class Chunk(_Node, frozen=True, omit_defaults=True, kw_only=True, tag="chunk"):
    """A piece of the traced code in one phase, for one microbatch.

    `chunk` numbers the piece in the trace; `part` numbers it inside its region; `body` is the key of
    its code; `forward` names the F whose saved Values a backward reads, or which runs again;
    `recompute` says that a backward computes them again, and what is kept nevertheless, and
    `checkpoint` that the user's code says so. A piece of code that is cut over ranks is a
    `piece_of` the chunk of this number before. An R runs where the phase that it `serves` does.
    `transfer` names the
    stream of what it receives from and sends to other slices, where the user chose one. It `leaves` so
    many multiprocessors of a device to the communication beside it. Along axes that share tensors its
    code was traced for inputs that lie as it `sees` them, and results as it `makes` them.
    """

    phase: Phase
    chunk: int
    part: int = 0
    body: str = ""
    forward: str = ""
    owners: tuple[Owner, ...] = ()
    recompute: Literal["", "nothing", "pieces", "expensive", "everything"] = ""
    checkpoint: Literal["", "nothing", "expensive"] = ""
    piece_of: int = -1
    serves: Literal["", "B", "BI", "BW"] = ""
    transfer: str = ""
    leaves: int = 0
    sees: tuple[Layouts, ...] = ()
    makes: tuple[Layouts, ...] = ()

    @property
    def again(self) -> Again:
        """What is kept of a forward that runs again; nothing does where this is empty."""
        if self.recompute == "pieces" or "nothing" in (self.recompute, self.checkpoint):
            return "pieces" if self.recompute == "pieces" else "nothing"
        return "expensive" if "expensive" in (self.recompute, self.checkpoint) else ""


class Comm(_Node, frozen=True, omit_defaults=True, kw_only=True, tag="comm"):
    """A communication. Nodes with one `key` are the two ends of a message, or one collective."""

    comm: CommKind
    group: Group
    key: str
    reverse: bool = False  # what an all_to_all or a shift has sent goes back


class Accumulate(_Node, frozen=True, omit_defaults=True, kw_only=True, tag="accumulate"):
    """Adds each input into the sum of the same position; the first to arrive starts the sum.

    With `offsets` there is one sum, of a bucket, and input i lies in it from element `offsets[i]` on.
    """

    offsets: tuple[int, ...] = ()


class Read(_Node, frozen=True, omit_defaults=True, kw_only=True, tag="read"):
    """The host reads token counts: rows to send to and to receive from each rank of the group."""

    group: Group


class Norm(_Node, frozen=True, omit_defaults=True, kw_only=True, tag="norm"):
    """The sum of squares of the inputs, input i times `weights[i]`."""

    weights: tuple[float, ...]


class Update(_Node, frozen=True, omit_defaults=True, kw_only=True, tag="update"):
    """The optimizer step of a bucket from its gradient `inputs[0]`, which it divides in place.

    `params` are all Values whose readers must be over before. The divisor is `count`, or the Value
    that follows the gradient in `inputs`. With `clip` the last input is the sum of all squared
    gradients; a `late` update does not wait for it.
    """

    params: tuple[str, ...]
    bucket: int
    count: float | None = None
    clip: float | None = None
    late: bool = False


class Fold(_Node, frozen=True, omit_defaults=True, kw_only=True, tag="fold"):
    """Gives buffers, its first inputs, their next content, its outputs, by what a forward of each data
    rank has left for them."""

    body: str


class Settle(_Node, frozen=True, omit_defaults=True, kw_only=True, tag="settle"):
    """Makes a late Update again if the norm, the last input, asks for smaller gradients."""

    bucket: int
    count: float | None = None
    clip: float


Node = Chunk | Comm | Accumulate | Read | Norm | Fold | Update | Settle


def label(
    phase: str, tags: Tags, *, part: int = 0, parts: int = 1, region: int | None = None
) -> str:
    """`F[PP=2,MB=0]`; `F[PP=2.3,MB=0]` for the fourth chunk of a region.

    The part follows the last of the region's own tags; `region` says how many of `tags` those are.
    """
    region = len(tags) if region is None else region
    suffix = f".{part}" if parts > 1 else ""
    words = [f"{tag}={value}" for tag, value in tags]
    if region:
        words[region - 1] += suffix
    elif suffix:
        words.insert(0, suffix)
    return f"{phase}[{','.join(words)}]"
