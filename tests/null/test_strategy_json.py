"""The published JSON form: what is imported, what is exported, and what is refused with its entry."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

import piper
from piper import Schedule, where
from piper.cli.main import main
from piper.directives.replicate import Replicate
from piper.errors import Call, PiperError, StrategyError
from piper.ir.directive import Directive
from piper.ir.select import Selector
from piper.strategies import from_json, to_json
from tests.strategies import strategy_of
from tests.zoo import program_of

pytestmark = pytest.mark.xdist_group("moe")
FILE = Path(__file__).parent / "strategies_json" / "two_stages.json"
EXAMPLES = Path(__file__).parents[2] / "examples"
ENTRIES = json.loads(FILE.read_text())


def plan_of(text: str | Path, name: str = "moe") -> str:
    plan = program_of(name).apply(from_json(text)).lower().plan
    return msgspec.structs.replace(plan, history=()).content_hash()


def test_import() -> None:
    code = program_of("moe").apply(from_json(FILE)).history_as_code()
    assert code.split("def strategy(s):\n")[1] == (
        "    mesh = s.mesh(pp=2, dp=2)\n"
        "    s.place(where(PP=0), mesh.at(pp=0))\n"
        "    s.place(where(PP=1), mesh.at(pp=1))\n"
        "    s.stream('dp_stream')\n"
        "    s.replicate(where(PP=0, EP=None), over='dp', reduce_stream='dp_stream')\n"
        "    s.replicate(where(PP=1), over='dp', reduce_stream='dp_stream')\n"
        "    s.stream('ep_stream')\n"
        "    s.shard(where(PP=0, EP='*'), over='dp', stream='ep_stream')\n"
        "    s.split(where(), 'MB', 2)\n"
        "    s.order([where(PP=1, MB=0, phase='F'), "
        "[where(PP=1, MB=1, phase='F'), where(PP=1, MB=0, phase='B')], "
        "where(PP=1, MB=1, phase='B')])\n"
    )


def test_round_trip() -> None:
    text = to_json(program_of("moe").apply(from_json(FILE)))
    wanted = [dict(entry) for entry in ENTRIES]
    for entry in wanted:
        if "devices" in entry:
            entry["devices"] = [0, 1] if entry["filter"]["PP"] == 0 else [2, 3]
    wanted[2]["filter"] = {"PP": 0, "EP": None}
    assert json.loads(text) == wanted
    assert plan_of(text) == plan_of(FILE)
    assert to_json(program_of("moe").apply(from_json(text))) == text


def test_a_place_names_the_stream_of_its_messages() -> None:
    entries = [dict(entry) for entry in ENTRIES]
    entries[1]["stream"] = "pp_stream"
    program = program_of("moe").apply(from_json(json.dumps(entries)))
    comms = program.lower().graph.comms
    used = {c.stream.partition(":")[0] for c in comms if c.comm in ("send", "recv")}
    assert used == {"pp_stream"}
    assert json.loads(to_json(program))[1]["stream"] == "pp_stream"
    assert plan_of(to_json(program)) == plan_of(json.dumps(entries))


def test_absent_tags_and_any_phase() -> None:
    entries = [dict(entry) for entry in ENTRIES]
    for absent in (None, "-"):
        entries[2]["filter"] = {"PP": 0, "EP": absent, "PASS": "*"}
        assert plan_of(json.dumps(entries)) == plan_of(FILE)


@pytest.mark.parametrize("strategy", ["one", "dp2", "ep2", "pp2", "pp2_dp2", "pp2_ep2"])
def test_shipped_strategies_have_a_published_form(strategy: str) -> None:
    schedule = "1f1b" if "pp2" in strategy else "none"
    program = program_of("moe").apply(strategy_of(strategy, schedule))
    text = to_json(program)
    again = program_of("moe").apply(from_json(text))
    assert to_json(again) == text
    kinds = [[c.comm for c in p.lower().graph.comms] for p in (program, again)]
    assert sorted(kinds[0]) == sorted(kinds[1])
    dispatch = [
        [
            [task.name for task in found.tasks if task.kind == "run"]
            for found in p.lower().plan.classes
        ]
        for p in (program, again)
    ]
    assert dispatch[0] == dispatch[1]


class Recorder:
    """A Schedule that only writes down what it is told."""

    def __init__(self) -> None:
        self.graph = program_of("moe").graph
        self.tags = self.graph.tag_values
        self.directives: list[Directive] = []

    def mesh(self, **axes: int) -> piper.Mesh:
        return piper.Mesh(tuple(axes.items()))

    def stream(self, name: str) -> None:
        pass

    def apply(self, directive: Directive, *, call: Call) -> None:
        self.directives.append(directive)


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {}),
        ({"shard_grads": False, "bucket_size": None}, {}),
        ({"shard_grads": True}, {"zero": 2}),
        ({"shard_grads": True, "shard_params": True}, {"zero": 3}),
        (
            {"bucket_size": 25, "gather_stream": "ag"},
            {"bucket_size": 25 * 2**20, "gather_stream": "ag"},
        ),
    ],
)
def test_options_of_replicate(fields: dict[str, Any], options: dict[str, Any]) -> None:
    recorder = Recorder()
    entry = {"op": "replicate", "filter": {}, "devices": [0, 1], **fields}
    from_json(json.dumps([entry]))(recorder)  # type: ignore[arg-type]
    assert recorder.directives == [Replicate(Selector(), over="dp", **options)]


def changed(number: int, **fields: Any) -> str:
    entries = [dict(entry) for entry in ENTRIES]
    entries[number - 1].update(fields)
    return json.dumps(entries)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[", "strategy: this is no JSON"),
        ("{}", "strategy: this is no list of directives"),
        ("[1]", "strategy, entry 1: no object"),
        (changed(2, op="plaze"), "entry 2: no directive is called 'plaze' (did you mean 'place'?)"),
        (changed(3, reduce="x"), "entry 3 (replicate): no field is called 'reduce'"),
        (changed(6, dim_name=None), "entry 6 (split): field 'dim_name': it is missing"),
        (changed(6, num_microbatches=10**9), "entry 6 (split): 16 samples cannot be split into"),
        (changed(6, num_microbatches=0), "entry 6 (split): field 'num_microbatches': 0"),
        (changed(2, devices=[1, 1]), "entry 2 (place): field 'devices': [1, 1]"),
        (changed(2, devices=[1, 2]), "entry 2 (place): field 'devices': device 2 is also in [0, 2]"),
        (changed(2, devices=[1]), "entry 2 (place): field 'devices': 1 devices, but [0, 2] has 2"),
        (changed(3, devices=[1, 3]), "field 'devices': F[PP=0.0] is placed on devices [0, 2]"),
        (changed(5, filter={"EPP": "*"}), "entry 5 (shard): field 'filter': no node has the tag 'EPP'"),
        (changed(5, filter={"EP": "all"}), "entry 5 (shard): field 'filter': EP is \"all\""),
        (changed(7, filters=[[{"PASS": "X"}], [{}]]), "entry 7 (order): field 'filters': PASS is \"X\""),
        (changed(7, filters=[[{}]]), "entry 7 (order): field 'filters': [[{}]]"),
        (changed(3, shard_params=True), "entry 3 (replicate): field 'shard_params': it goes with"),
        (changed(1, filter={"PP": 7}), "entry 1 (place): where(PP=7) selects nothing"),
        (changed(5, filter={"PP": 0}), "entry 3 (replicate): field 'filter': entry 5 (shard) takes out"),
    ],
)  # fmt: skip
def test_refusals_name_the_entry(text: str, words: str) -> None:
    with pytest.raises(PiperError) as caught:
        program_of("moe").apply(from_json(text))
    assert words in str(caught.value)


def apply_two_stages(s: Schedule, **options: Any) -> None:
    mesh = s.mesh(pp=2, dp=2, ep=2)
    for stage in range(2):
        s.place(where(PP=stage), mesh.at(pp=stage))
    s.replicate(where(EP=None), over=("dp", "ep"), **options)
    s.replicate(where(EP="*"), over="dp")
    s.shard(where(EP="*"), over="ep")


def test_what_has_no_published_form() -> None:
    with pytest.raises(
        StrategyError, match=r"replicate \(.*test_strategy_json.py:\d+\): this has no"
    ):
        to_json(program_of("moe").apply(apply_two_stages))

    def fast(s: Schedule) -> None:
        s.stream("fast", priority="high")

    with pytest.raises(StrategyError, match="a stream has no priority there"):
        to_json(program_of("moe").apply(fast))

    def communication(s: Schedule) -> None:
        strategy_of("ep2", "none")(s)
        s.order([where(MB=0, comm="all_to_all"), where(MB=1, comm="all_to_all")])

    with pytest.raises(StrategyError, match="a filter selects no communication"):
        to_json(program_of("moe").apply(communication))


def test_a_missing_file() -> None:
    with pytest.raises(StrategyError, match=r"there is no file none\.json"):
        from_json("none.json")


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(EXAMPLES / "moe.py"), "--strategy", str(FILE)]) == 0
    printed = capsys.readouterr().out
    assert "s.shard(where(PP=0, EP='*'), over='dp', stream='ep_stream')" in printed
    assert main(["plan", str(EXAMPLES / "dense.py"), "--strategy", str(FILE)]) == 2
    assert "two_stages.json, entry 5 (shard): field 'filter'" in capsys.readouterr().err
    assert main(["plan", str(EXAMPLES / "moe.py"), "--strategy", "none.json"]) == 2
    assert "there is no file none.json" in capsys.readouterr().err


def test_a_v_shaped_placement_is_written_per_place() -> None:
    def folded(s: Schedule) -> None:
        mesh = s.mesh(pp=2, dp=2)
        for stage in range(4):
            s.place(where(PP=stage), mesh.at(pp=min(stage, 3 - stage)))
        s.replicate(where(), over="dp")

    entries = json.loads(to_json(program_of("deep").apply(folded)))
    found = [(e["filter"], e["devices"]) for e in entries if e["op"] == "replicate"]
    assert found == [({"PP": i}, [0, 1] if i in (0, 3) else [2, 3]) for i in range(4)]
