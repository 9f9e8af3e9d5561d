"""The text form of a graph: one line per fact, for reading and for parsing back.

    graph logical
    mesh pp=2 dp=2
    value x_1[MB=0] activation float32[4,8] along split(0) {dp: split(0)}
    chunk F[PP=0,MB=0] (tokens[MB=0], w) -> (x_1[MB=0]) at pp=0 on compute {...}

What a line does not spell out stands in braces as JSON.
"""

from __future__ import annotations

import re
from typing import Any, get_args

import msgspec

from piper.errors import PlanError
from piper.ir.graph import Graph
from piper.ir.layouts import REPLICATED, layout_from_text, layouts_from_text, layouts_text
from piper.ir.nodes import COMPUTE, Node
from piper.ir.values import Value
from piper.mesh import Slice

_HEADER = ("mesh", "streams", "splits", "orders", "edges", "overlaps", "loss", "count", "metrics")
_KINDS = tuple(kind.__struct_config__.tag for kind in get_args(Node))
_NODE = re.compile(
    r"(?P<kind>\w+) (?P<name>\S+) \((?P<inputs>.*?)\) -> \((?P<outputs>.*?)\)"
    r"(?: at (?P<slice>\S+))? on (?P<stream>\S+)(?: (?P<rest>\{.*\}))?$"
)
_VALUE = re.compile(
    r"value (?P<name>\S+) (?P<role>\w+) (?P<dtype>\w+)"
    r"\[(?P<shape>[\d,]*)(?:<=(?P<bound>\d+)(?P<more>[\d,]*))?\](?: along (?P<batch>\S+))?"
    r"(?: at (?P<slice>\S+))?(?: \{(?P<layout>.*?)\})?(?: of (?P<of>\S+))?"
    r"(?: with (?P<rest>\{.*\}))?$"
)


def graph_to_text(graph: Graph) -> str:
    lines = [f"graph {graph.level}"]
    for field in _HEADER:
        value = getattr(graph, field)
        if value and value != type(value)():
            lines.append(f"{field} {msgspec.json.encode(value).decode()}")
    lines += [_value_line(value) for value in graph.values.values()]
    lines += [node_line(node) for node in graph.nodes.values()]
    return "\n".join(lines) + "\n"


def _value_line(value: Value) -> str:
    line = f"value {value.name} {value.role} {value.type}"
    if value.batch != REPLICATED:
        line += f" along {value.batch}"
    if value.slice is not None:
        line += f" at {value.slice}"
    if value.layout:
        line += f" {{{layouts_text(value.layout)}}}"
    if value.of:
        line += f" of {value.of}"
    fields: dict[str, Any] = msgspec.to_builtins(value)
    for spelled in ("name", "role", "type", "batch", "slice", "layout", "of"):
        fields.pop(spelled, None)
    return line + (f" with {msgspec.json.encode(fields).decode()}" if fields else "")


def node_line(node: Node) -> str:
    fields: dict[str, Any] = msgspec.to_builtins(node)
    kind = fields.pop("kind")
    for spelled in ("name", "inputs", "outputs", "slice", "stream"):
        fields.pop(spelled, None)
    line = f"{kind} {node.name} ({' '.join(node.inputs)}) -> ({' '.join(node.outputs)})"
    if node.slice is not None:
        line += f" at {node.slice}"
    line += f" on {node.stream}"
    return line + (f" {msgspec.json.encode(fields).decode()}" if fields else "")


def graph_from_text(text: str) -> Graph:
    fields: dict[str, Any] = {"nodes": {}, "values": {}}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            _parse_line(line, fields)
        except (ValueError, RecursionError) as error:  # those of msgspec are ValueErrors
            why = error.message if isinstance(error, PlanError) else str(error)
            raise PlanError(f"graph text, line {number}: {why}", details=[line[:200]]) from None
    try:
        return msgspec.convert(fields, type=Graph)
    except msgspec.ValidationError as error:
        raise PlanError(f"graph text: {error}") from None


def _parse_line(line: str, fields: dict[str, Any]) -> None:
    word, _, rest = line.partition(" ")
    if not line.strip():
        return
    if word == "graph":
        fields["level"] = rest
    elif word in _HEADER:
        fields[word] = msgspec.json.decode(rest)
    elif word == "value" and (match := _VALUE.match(line)):
        value = _parse_value(match)
        fields["values"][value["name"]] = value
    elif word in _KINDS and (match := _NODE.match(line)):
        node = _parse_node(match)
        fields["nodes"][node["name"]] = node
    else:
        raise PlanError("not understood")


def _parse_slice(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    pairs = [] if text == "*" else [word.split("=") for word in text.split(",")]
    return msgspec.to_builtins(Slice(tuple((axis, int(at)) for axis, at in pairs)))


def _parse_value(match: re.Match[str]) -> dict[str, Any]:
    found = match.groupdict()
    return {
        **(msgspec.json.decode(found["rest"]) if found["rest"] else {}),
        "name": found["name"],
        "role": found["role"],
        "type": {
            "shape": [int(n) for n in (found["shape"] + (found["more"] or "")).split(",") if n],
            "dtype": found["dtype"],
            "bound": int(found["bound"]) if found["bound"] else None,
        },
        "batch": msgspec.to_builtins(layout_from_text(found["batch"] or "replicated")),
        "layout": msgspec.to_builtins(layouts_from_text(found["layout"] or "")),
        "slice": _parse_slice(found["slice"]),
        "of": found["of"] or "",
    }


def _parse_node(match: re.Match[str]) -> dict[str, Any]:
    found = match.groupdict()
    return {
        **(msgspec.json.decode(found["rest"]) if found["rest"] else {}),
        "kind": found["kind"],
        "name": found["name"],
        "inputs": found["inputs"].split(),
        "outputs": found["outputs"].split(),
        "slice": _parse_slice(found["slice"]),
        "stream": found["stream"] or COMPUTE,
    }
