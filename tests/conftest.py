"""One thread per process: ranks and test workers share few cores. The end tells what was covered."""

import sys
from collections import Counter

import torch

from piper.runtime.launch.signals import default_signals

torch.set_num_threads(1)
default_signals()  # in a background shell too: tests interrupt the processes that they start

_COVERED = {"legal": Counter(), "illegal": Counter()}  # of all test workers


def pytest_addoption(parser):  # type: ignore[no-untyped-def]
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files")


def pytest_sessionfinish(session):  # type: ignore[no-untyped-def]
    module = sys.modules.get("tests.property.coverage")
    if module is None:
        return
    output = getattr(session.config, "workeroutput", None)
    if output is None:
        _add(module.COVERED)
    else:  # a worker of xdist, which passes on only plain data
        output["covered"] = {what: list(found.items()) for what, found in module.COVERED.items()}


def pytest_testnodedown(node, error):  # type: ignore[no-untyped-def]
    found = getattr(node, "workeroutput", {}).get("covered", {})
    _add({what: {tuple(key): times for key, times in pairs} for what, pairs in found.items()})


def pytest_terminal_summary(terminalreporter):  # type: ignore[no-untyped-def]
    passed = terminalreporter.stats.get("passed", [])
    planted = [v for report in passed for name, v in report.user_properties if name == "planted"]
    if planted:
        terminalreporter.section("faults planted in good plans")
        for line in sorted(planted):
            terminalreporter.write_line(line)
    if any(_COVERED.values()):
        from tests.property.coverage import summary

        terminalreporter.section("random programs")
        for line in summary(_COVERED):
            terminalreporter.write_line(line)


def _add(covered):  # type: ignore[no-untyped-def]
    for what, found in covered.items():
        _COVERED[what].update(found)
