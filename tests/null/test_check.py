"""The plan checker's own errors: what they say, and proofs that no good plan can break."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from piper.check import check_plan, compressed, problems
from piper.check.proofs.resident import MAX_RESIDENT, most_resident
from piper.cli.main import main
from piper.errors import CheckError
from piper.ir.graph import Stream
from piper.ir.tensor_type import TensorType
from piper.mesh import Group, Mesh, Slice
from piper.plan.slots import Slot
from piper.plan.tasks import Task
from piper.plan.types import ParamGroup, Plan, RankClass
from tests.tasks import BODY, comm, run

OTHER = "1" * 16
HALVES = (Slice((("pp", 0),)), Slice((("pp", 1),)))
X = Slot("x", "temp", TensorType((4,), "float32"))


def _plan(*tasks: list[Task], slots: tuple[Slot, ...], num_streams: int, device: str) -> Plan:
    """Two ranks that only exchange messages; no parameters."""
    return Plan(
        mesh=Mesh((("pp", 2),)),
        streams=tuple(Stream(f"s{i}") for i in range(num_streams)),
        groups=(Group(HALVES, ()),),
        classes=tuple(
            RankClass(at, slots, tuple(mine), {}) for at, mine in zip(HALVES, tasks, strict=True)
        ),
        tensors={},
        batch={},
        batch_constants={},
        data_axes=(),
        num_microbatches=1,
        param_groups=(ParamGroup("SGD"),),
        seed=0,
        device=device,
        clip=None,
        bodies=(BODY, OTHER),
    )


def _waiting(num: int, *, chained: bool = False, device: str = "cuda") -> Plan:
    """One rank sends on `num` streams, the other receives; `chained`: one after the other."""
    slots = tuple(msgspec.structs.replace(X, name=f"x{i}") for i in range(num))
    made: list[Task] = [run("F[]", 0, phase="F", writes=range(num))]
    sends = [
        comm("send", f"send{i}", i, i, waits=(0,) if i else (), frees=(i,), key=f"k{i}")
        for i in range(num)
    ]
    recvs = [
        comm("recv", f"recv{i}", i, waits=(i - 1,) if chained and i else (), target=i, key=f"k{i}")
        for i in range(num)
    ]
    every = tuple(range(num))
    end: list[Task] = [run("B[]", 0, phase="B", body=OTHER, waits=every, reads=every, frees=every)]
    return _plan(made + sends, recvs + end, slots=slots, num_streams=num, device=device)


def test_more_waiting_kernels_than_places() -> None:
    assert problems(_waiting(MAX_RESIDENT)) == []
    (found,) = problems(_waiting(MAX_RESIDENT + 1))
    assert found.proof == "resident" and "17 communications may wait at once" in found.message
    assert len(found.tasks) == 17 and set(found.tasks) == {f"recv{i}" for i in range(17)}
    # One after the other they never wait at once; and a CPU has no places to run out of.
    assert problems(_waiting(40, chained=True)) == []
    assert problems(_waiting(40, device="cpu")) == []
    chain = compressed(_waiting(40, chained=True))
    assert most_resident(chain.local(chain.parties[1]))[0] == 1


def test_messages_of_another_shape_or_dtype() -> None:
    plan = _waiting(2)
    for changes in ({"shape": (5,)}, {"dtype": "float64"}, {"bound": 7}):
        other = msgspec.structs.replace(X.type, **changes)
        slots = (msgspec.structs.replace(plan.classes[1].slots[0], type=other), X)
        part = msgspec.structs.replace(plan.classes[1], slots=slots)
        wrong = msgspec.structs.replace(plan, classes=(plan.classes[0], part))
        with pytest.raises(CheckError, match=r"messages: pp=0 to pp=1: send0 sends float32\[4\]"):
            check_plan(wrong)


def test_a_circle_over_two_ranks_is_shown() -> None:
    """Each rank sends what it has received; nobody begins."""
    tasks = []
    for key, other in (("a", "b"), ("b", "a")):
        recv = comm("recv", f"recv.{key}", 0, target=0, key=key)
        send = comm("send", f"send.{other}", 1, 0, waits=(0,), frees=(0,), key=other)
        tasks.append([recv, send])
    # Messages of both directions travel on streams of their own.
    tasks[1] = [msgspec.structs.replace(t, stream=1 - t.stream) for t in tasks[1]]
    plan = _plan(*tasks, slots=(X,), num_streams=2, device="cpu")
    with pytest.raises(CheckError) as refused:
        check_plan(plan)
    assert str(refused.value) == (
        "acyclic: ranks wait for each other in a circle\n"
        "    pp=1: task 1 send send.a on s0, group pp=0|pp=1 over - waits for the event of recv.b, "
        "which meets send.b\n"
        "    pp=0: task 1 send send.b on s1, group pp=0|pp=1 over - waits for the event of recv.a, "
        "which meets send.a"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stream": 9}, "a stream that does not exist"),
        ({"source": 77}, "a slot that does not exist"),
        ({"waits": (77,)}, "waits for a task that does not exist"),
        ({"group": 5}, "a group that does not exist"),
        ({"group": -1}, "a group that does not exist"),
        ({"source": -1}, "does not bring and leave what a send does"),
        ({"target": 0}, "does not bring and leave what a send does"),
        ({"splits": 0}, "sends rows by number, which a send cannot"),
        ({"comm": "sent"}, "is a communication 'sent', which does not exist"),
        ({"origin": 3}, "comes from a directive that does not exist"),
    ],
)
def test_numbers_that_name_nothing(changes: dict[str, object], words: str) -> None:
    plan = _waiting(2)
    tasks = list(plan.classes[0].tasks)
    tasks[1] = msgspec.structs.replace(tasks[1], **changes)
    part = msgspec.structs.replace(plan.classes[0], tasks=tuple(tasks))
    (found,) = problems(msgspec.structs.replace(plan, classes=(part, plan.classes[1])))
    assert found.proof == "structure" and words in found.message and found.tasks == ("send0",)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    plan = _waiting(2)
    good.write_bytes(plan.to_json())
    assert main(["check", str(good)]) == 0
    printed = capsys.readouterr().out
    assert "proved for 2 classes: 6 tasks, 2 messages, 0 collectives, 4 slots, 0 updates" in printed
    assert "peak of a rank" in printed and "32 B" in printed
    assert main(["check", str(good), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peaks"][1]["total"] == 32
    assert main(["check", str(good), "--memory-limit", "31B"]) == 2
    assert "CheckError: limit: pp=0 needs 32 B, the limit is 31 B" in capsys.readouterr().err
    tasks = (
        *plan.classes[0].tasks[:2],
        msgspec.structs.replace(plan.classes[0].tasks[2], waits=()),
    )
    part = msgspec.structs.replace(plan.classes[0], tasks=tasks)
    bad.write_bytes(msgspec.structs.replace(plan, classes=(part, plan.classes[1])).to_json())
    assert main(["check", str(bad)]) == 2
    assert "events: send1 reads x1 but does not wait for F[]" in capsys.readouterr().err
    assert main(["check", str(tmp_path / "none.json")]) == 2
    assert "there is no file" in capsys.readouterr().err
