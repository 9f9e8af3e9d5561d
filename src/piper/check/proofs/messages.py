"""messages: between two parties, on one stream, the n-th recv takes exactly the n-th send."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from piper.check.parties import Party, World
from piper.check.problem import Problem, problem
from piper.ir.communication import same_tensor
from piper.ir.layouts import layouts_text
from piper.plan.slots import Slot
from piper.plan.tasks import Comm

At = tuple[Party, int]
Channel = tuple[int, int, int]  # sender, receiver, stream


def messages(world: World) -> Iterator[Problem]:
    """Sends and recvs that differ in number, order, key, shape or dtype."""
    sent, received, lost = channels(world)
    for at in lost:
        task = at[0].tasks[at[1]]
        yield problem(world, "messages", f"{task.name} has no peer: its group is no pair", at)
    for channel in sorted(sent.keys() | received.keys()):
        yield from _compare(world, channel, sent.get(channel, []), received.get(channel, []))


def channels(
    world: World,
) -> tuple[dict[Channel, list[At]], dict[Channel, list[At]], list[At]]:
    """Per channel its sends and its recvs in dispatch order; and tasks whose group is no pair."""
    sent: dict[Channel, list[At]] = defaultdict(list)
    received: dict[Channel, list[At]] = defaultdict(list)
    lost: list[At] = []
    for party in world.parties:
        for index, task in enumerate(party.tasks):
            if not isinstance(task, Comm) or not task.facts.is_message:
                continue
            members = party.groups[task.group]
            group = world.group(task)
            if len(group.slices) != 2 or group.over or party.number not in members:
                lost.append((party, index))
                continue
            peer = members[0] if members[1] == party.number else members[1]
            if task.facts.sends:
                sent[party.number, peer, task.stream].append((party, index))
            else:
                received[peer, party.number, task.stream].append((party, index))
    return sent, received, lost


def _compare(
    world: World, channel: Channel, sent: list[At], received: list[At]
) -> Iterator[Problem]:
    names = {party.number: party.label for party in world.parties}
    where = f"{names[channel[0]]} to {names[channel[1]]}"
    for one, other in zip(sent, received, strict=False):
        send, recv = one[0].tasks[one[1]], other[0].tasks[other[1]]
        assert isinstance(send, Comm) and isinstance(recv, Comm)
        if send.key != recv.key:
            text = f"{where}: {send.name} meets {recv.name}: sends in another order than receives"
            yield problem(world, "messages", text, one, other)
            return  # everything after it is shifted
        if send.tags != recv.tags:
            text = f"{where}: {send.name} has other tags than {recv.name}"
            yield problem(world, "labels", text, one, other)
        out, into = one[0].slots[send.source], other[0].slots[recv.target]
        if not same_tensor(out, into):
            text = f"{where}: {send.name} sends {show(out)}, {recv.name} expects {show(into)}"
            yield problem(world, "messages", text, one, other)
        if out.cut != into.cut:
            lies = f"{layouts_text(out.cut)}, {recv.name} expects {layouts_text(into.cut)}"
            yield problem(world, "layouts", f"{where}: {send.name} sends {lies}", one, other)
    for at in sent[len(received) :]:
        name = at[0].tasks[at[1]].name
        yield problem(world, "messages", f"{where}: nobody receives {name}", at)
    for at in received[len(sent) :]:
        name = at[0].tasks[at[1]].name
        yield problem(world, "messages", f"{where}: nobody sends what {name} waits for", at)


def show(slot: Slot) -> str:
    dims = [str(d) for d in slot.shape]
    if slot.bound is not None:
        dims[0] = f"<={slot.bound}"
    return f"{slot.dtype}[{', '.join(dims)}]"
