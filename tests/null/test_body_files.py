"""Bodies from files are data: names are looked up in tables, and nothing is evaluated."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from piper.bodies.files.codec import decode, encode, load
from piper.errors import PlanError, TraceError

X = {"$": ["node", 0]}
OUT = ["out", {"$": ["tuple", [{"$": ["node", 1]}]]}]


def body(*call: Any) -> str:
    """One input, one call, whose result is the body's."""
    return json.dumps([["in"], list(call), OUT])


def constant(*data: Any) -> str:
    return json.dumps([["in"], ["constant", list(data)], OUT])


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that an attack would make, and what attacks by name would call."""
    path = tmp_path / "attacked"
    for name in ("load", "save"):
        monkeypatch.setattr(torch, name, lambda *_, **__: path.write_text("attacked"))
    return path


OPERATORS = [
    "torch:load", "torch:save", "torch:os", "torch.os:system", "torch:os.system", "torch:jit",
    "os:system", "posix:system", "builtins:eval", "builtins:__import__", "__import__",
    "_operator:attrgetter", "_operator:methodcaller", "_operator:setitem", "_operator:call",
    "math:__loader__", "torch:__dict__", "torch.random:torch", "torch:hub", "torch:compile",
    "aten.save.default", "aten.from_file.default", "aten.from_file.out", "aten.mm",
    "aten.mm.default.__call__", "aten.__class__.default", "aten.mm.__class__",
    "aten.__init__.__globals__", "__class__.mm.default", "prim.Print.default",
    "debugprims.load_tensor.default", "inductor._reinterpret_tensor.default",
    "profiler._record_function_enter.default", "nowhere.mm.default", "aten.nothing.default",
    "aten.relu.default\n", "aten.rel\u00fc.default", "", ".", "..", ":", "::",
]  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_outside_the_list_are_refused(name: str, trap: Path) -> None:
    for args in ([X], [str(trap)], [X, str(trap)], [f"touch {trap}"]):
        with pytest.raises(PlanError):
            load(body(name, args))
    assert not trap.exists()


@pytest.mark.parametrize(
    "keyword",
    [
        "alpha=__import__('os').system('touch {trap}'),other",
        "other, **__import__('os').environ",
        "other\n    __import__('os').system('touch {trap}')\n",
        "__class__",
        "other ",
        "\u00f6ther",
        "",
    ],
)
def test_a_keywords_name_carries_no_code(keyword: str, trap: Path) -> None:
    with pytest.raises(PlanError, match="takes no argument"):
        load(body("aten.add.Tensor", [X], {keyword.replace("{trap}", str(trap)): X}))
    with pytest.raises(PlanError, match="takes"):
        load(body("_operator:add", [X, X], {keyword: X}))
    assert not trap.exists()


def test_strings_stay_strings(trap: Path) -> None:
    """Text that would be code if it were printed without quotes comes out as the text it is."""
    text = "\"'+__import__('os').system('touch " + str(trap) + "')+'\"\n\\"
    function = load(body("aten.gelu.default", [X], {"approximate": text}))
    with pytest.raises(RuntimeError, match="approximate"):
        function([torch.ones(2)])
    assert not trap.exists()


@pytest.mark.parametrize(
    "value",
    [
        {"$": ["node", 1]},
        {"$": ["node", -1]},
        {"$": ["node", True]},
        {"$": ["node", "0"]},
        {"$": ["node", 10**18]},
        {"$": ["dtype", "load"]},
        {"$": ["dtype", "__dict__"]},
        {"$": ["layout", "os"]},
        {"$": ["device", "cpu:0; import os"]},
        {"$": ["format", "__class__"]},
        {"$": ["float", "__import__('os')"]},
        {"$": ["complex", [{"$": ["node", 0]}, 1]]},
        {"$": ["eval", "1"]},
        {"$": ["slice", [1]]},
        {"$": []},
        {"$": None},
        {"x": ["node", 0]},
        {"$": ["node", 0], "x": 1},
        {},
    ],
)
def test_arguments_are_of_known_types(value: Any) -> None:
    with pytest.raises(PlanError):
        load(body("aten.relu.default", [value]))
    with pytest.raises(PlanError):
        load(body("_operator:getitem", [X, value]))


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("aten.relu.default", [], {}),
        ("aten.relu.default", [X, X], {}),
        ("aten.relu.default", ["text"], {}),
        ("aten.relu.default", [None], {}),
        ("aten.add.Tensor", [X, X, X], {}),
        ("aten.add.Tensor", [X, X], {"other": X}),
        ("aten.view.default", [X, ["a"]], {}),
        ("aten.view.default", [X, 1.5], {}),
        ("aten.t.default", [], {}),
        ("aten.detach.default", [], {}),
        ("aten.uniform_.default", [X], {"from": 0.0}),  # would be a syntax error
        ("aten.sum.dim_IntList", [X, {"a": 1}], {}),
        ("aten.empty.memory_format", [[2]], {"dtype": 6}),
        ("_operator:getitem", [X], {}),
        ("_operator:getitem", [X, 0, 0], {}),
        ("_operator:getitem", [2, X], {}),
        ("_operator:getitem", [X, X], {}),
        ("torch.random:manual_seed", [], {}),
    ],
)
def test_calls_fit_the_operators_signature(name: str, args: list[Any], kwargs: Any) -> None:
    with pytest.raises(PlanError, match="a body is not as Piper writes it"):
        load(body(name, args, kwargs))


@pytest.mark.parametrize(
    "data",
    [
        ("float32", [10**12], ""),
        ("float32", [2], base64.b64encode(bytes(4)).decode()),
        ("float32", [2**40, 2**40], ""),
        ("float32", [-1, -2], base64.b64encode(bytes(8)).decode()),
        ("float32", [2.0], base64.b64encode(bytes(8)).decode()),
        ("float32", [0, 2**62], ""),
        ("float32", 2, base64.b64encode(bytes(8)).decode()),
        ("load", [1], "AAAA"),
        ("os", [1], "AAAA"),
        ("uint8", [3], "A&AA"),
        ("uint8", [3], "\u00e4AAA"),
        ("uint8", [2**20 + 3], base64.b64encode(bytes(2**20 + 3)).decode()),
        ("uint8", [3]),
    ],
)
def test_constants_have_the_bytes_of_their_shape(data: tuple[Any, ...]) -> None:
    with pytest.raises(PlanError, match="constant"):
        load(constant(*data))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        "[[]]",
        '[["in"]]',
        '[["in"],["out"]]',
        '[["in"],["out",null]]',
        '[["in"],["out",[1]]]',
        '[["in",1],["out",[]]]',
        '[["out",[]],["in"]]',
        '[["out",[]],["out",[]]]',
        '[["aten.relu.default",[],[]],["out",[]]]',
        "[" * 100_000,
        '[["in"],["aten.relu.default",' + "[" * 200 + "]" * 200 + '],["out",[]]]',
        '[["in"],["aten.add.Scalar",[{"$":["node",0]},' + "9" * 5000 + ']],["out",[]]]',
        '[["in"],["aten.add.Scalar",[{"$":["node",0]},9223372036854775808]],["out",[]]]',
        "\ud800",
    ],
)
def test_text_that_is_no_body(text: str) -> None:
    with pytest.raises(PlanError, match="a body is not as Piper writes it"):
        load(text)


def test_loading_allocates_nothing_of_what_a_body_would() -> None:
    size = [10**15]
    function = load(body("aten.zeros.default", [size], {"dtype": {"$": ["dtype", "float32"]}}))
    with pytest.raises(RuntimeError):  # only the call would
        function([torch.ones(1)])


def test_captured_code_may_call_only_what_can_be_loaded() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.save, (x, "file")),))
    with pytest.raises(TraceError, match="cannot be shipped to workers"):
        encode(graph)
    graph = fx.Graph()
    made = graph.call_function(torch.ops.aten.from_file.default, ("file",))
    graph.output((made,))
    with pytest.raises(TraceError, match="cannot be shipped to workers"):
        encode(graph)


def test_what_is_written_is_read_again() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = graph.call_function(
        torch.ops.aten.full.default,
        ([2], complex(float("inf"), 1.0)),
        {"dtype": torch.complex64, "device": torch.device("cpu"), "pin_memory": False},
    )
    item = graph.call_function(torch.ops.aten.slice.Tensor, (x, 0, 0, 1))
    graph.output((made, None, graph.call_function(torch.ops.aten.clone.default, (item,))))
    x.meta["val"] = torch.arange(3)
    text = encode(graph)
    assert '["in","int64[3]"]' in text
    assert encode(decode(text).graph) == text
    full, nothing, first = load(text)([torch.arange(3)])
    assert full.isinf().all() and nothing is None and first.tolist() == [0]


def test_a_library_of_the_process_is_allowed() -> None:
    library = torch.library.Library("piper_test_files", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.define("open_it(Tensor x, str filename) -> Tensor")
    with pytest.raises(PlanError, match="this process has no operator piper_test_files"):
        load(body("piper_test_files.once.default", [X]))
    for name in ("twice", "open_it"):
        library.impl(name, lambda x, *_: x * 2, "CompositeExplicitAutograd")
    assert load(body("piper_test_files.twice.default", [X]))([torch.ones(1)])[0].item() == 2
    with pytest.raises(PlanError, match="a body may not call"):
        load(body("piper_test_files.open_it.default", [X, "file"]))
