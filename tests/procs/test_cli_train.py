"""`piper train` from end to end, on local processes and under torchrun; `piper doctor`."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from piper.cli.main import main

pytestmark = pytest.mark.xdist_group("procs")

EXAMPLES = Path(__file__).parents[2] / "examples"
FILE = str(Path(__file__).with_name("tiny.py"))
TWO = ["--dp", "2", "--zero", "2", "--microbatches", "2", "--clip", "1"]


def _piper(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "piper", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def _events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_local_and_torchrun_train_alike(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", FILE, *TWO, "--steps", "3", "--nproc", "2", "--json"]
    assert main(arguments) == 0
    local = _events(capsys.readouterr().out)
    process = _piper(*arguments, "--launch", "torchrun")
    out, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    ran = _events(out)
    assert [event["rank"] for event in local if event["event"] == "launch"] in ([0, 1], [1, 0])
    for events in (local, ran):
        assert [e["step"] for e in events if e["event"] == "step"] == [1, 2, 3]
        assert [e["event"] for e in events][-2:] == ["evaluation", "end"]
    losses = [[e["loss"] for e in events if "loss" in e] for events in (local, ran)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0][2] < losses[0][0]
    assert [e["lr"] for e in ran if e["event"] == "step"] == pytest.approx([0.2, 0.18, 0.162])


def test_a_saved_plan_trains_on_processes_as_its_file_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = str(tmp_path / "plan.json")
    assert main(["plan", FILE, *TWO, "-o", plan]) == 0
    capsys.readouterr()
    losses = []
    for program in ([FILE, *TWO], [plan, "--data", FILE]):
        assert main(["train", *program, "--steps", "2", "--nproc", "2", "--json"]) == 0
        events = _events(capsys.readouterr().out)
        losses.append([event["loss"] for event in events if "loss" in event])
    assert losses[0] == losses[1] and len(losses[0]) == 4


def test_data_that_fails_under_torchrun_is_told_once_with_its_rank() -> None:
    arguments = ["train", FILE, *TWO, "--steps", "9", "--nproc=2", "--launch", "torchrun"]
    process = _piper(*arguments, BROKEN="yes")
    out, errors = process.communicate(timeout=280)
    assert process.returncode != 0
    assert "step 2/9" in out and "step 3/9" not in out
    assert errors.count("rank 1 failed in fetch: OSError: block 7 is damaged") == 1


def test_a_file_without_data_trains_on_its_batches(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(EXAMPLES / "moe.py")
    options = ["--launch", "loopback", "--steps", "2", "--nproc", "2", "--lr", "0.01"]
    assert main(["train", file, *options, "--optimizer", "sgd", "--precision", "bf16-wire"]) == 0
    printed = capsys.readouterr()
    assert ", precision bf16-wire, plan " in printed.out
    assert "has no data(share): each step makes a batch()" in printed.err
    assert "2 ranks (dp=2)" in printed.out and "lr 1.00e-02" in printed.out
    assert "step 2/2  loss" in printed.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dp", "2", "--nproc", "3"], "--nproc 3, but the strategy has 2 ranks"),
        (["--nproc", "0"], "--nproc 0"),
        (["--address", "auto"], "--address does not go with --launch local"),
        (["--launch", "loopback", "--timeout", "3"], "--timeout does not go with"),
        (["--evaluate-every", "2"], "--evaluate-every 2, but evaluate is missing"),
    ],
)
def test_wrong_options_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(EXAMPLES / "moe.py"), "--steps", "1", *options]) == 2
    printed = capsys.readouterr().err
    assert message in printed and "legal:" in printed


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("background", [False, True])
def test_ctrl_c_says_where_it_was_and_leaves_nobody(background: bool) -> None:
    """Also as a background job, which a shell starts with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if background else None
    try:
        process = _piper("train", FILE, *TWO, "--steps", "100000")
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("step      2/"):
                break
        [parent] = _children(process.pid)
        children = [parent, *_children(parent)]
        assert len(children) == 3
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted after step " in errors and "Traceback" not in errors
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline, children
        time.sleep(0.1)


def test_doctor_measures_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["python"].startswith("3.") and found["versions"]["torch"]
    assert found["devices"]["cores"] >= 1 and found["limits"]["open_files"] != 0
    links = {(link["link"], link["operation"], link["size"]): link for link in found["links"]}
    assert ("gloo", "all_reduce", "16 MiB") in links and ("gloo", "send", "1 KiB") in links
    assert all(link["gigabytes_per_second"] > 0 for link in links.values())
    for problem in found["problems"]:
        assert problem["problem"] and problem["do"]


def test_doctor_names_problems_with_a_remedy() -> None:
    from piper.cli.doctor_command import as_text

    found = {
        "versions": {"python": "3.12.0"},
        "compiler": "none",
        "devices": {
            "cores": 2,
            "memory": 2**33,
            "gpus": [{"name": "H200", "memory": 2**37, "free": 2**36}],
            "mps": "available",
        },
        "links": [],
        "limits": {
            "open_files": 256,
            "processes": -1,
            "shared_memory": 2**26,
            "temporary": {"folder": "/tmp", "free": 2**32},
            "overcommit": "heuristic",
        },
        "problems": [{"problem": "a process may open 256 files", "do": "ulimit -n 65536"}],
    }
    text = as_text(found)
    assert "gpu 0        H200, 128.0 GiB, 64.0 GiB free" in text
    assert "processes    no limit" in text and "/dev/shm     64 MiB" in text
    assert text.endswith("problems\n  a process may open 256 files\n    do: ulimit -n 65536")


SPEAKS = """
import torch
from torch import nn

print("imported")


def model():
    return nn.Linear(4, 2)


def batch():
    return torch.ones(8, 4)


def step(model, batch):
    return model(batch).square().mean()


def data(share):
    print("reading")
    while True:
        yield batch()[share.rows(8)]
"""


def test_json_has_stdout_for_itself(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also against the processes of ranks, which import the file and read its data."""
    file = tmp_path / "speaks.py"
    file.write_text(SPEAKS)
    assert main(["train", str(file), "--dp", "2", "--steps", "2", "--json"]) == 0
    printed = capfd.readouterr()
    events = [json.loads(line)["event"] for line in printed.out.splitlines()]
    assert events.count("step") == 2 and events[-1] == "end"
    assert printed.err.count("imported") == 3 and printed.err.count("reading") == 2
    print("after")
    assert capfd.readouterr().out == "after\n"
