"""Words of the command line: names that are near, help, completion, and errors that speak of options."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import piper
from piper.cli.error_output import in_options
from piper.cli.main import COMMANDS, main, parsed, whole_parser
from piper.errors import Call, MeshError, RunError, Source

EXAMPLES = Path(__file__).parents[2] / "examples"
MOE, DENSE = (str(EXAMPLES / name) for name in ("moe.py", "dense.py"))


def _misused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == "" or "--json" in words
    return printed.out or printed.err


def test_version_names_torch_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    found = capsys.readouterr().out
    assert re.fullmatch(rf"piper {piper.__version__} \(torch \d+\S*, Python 3\.\d+\.\d+\)\n", found)


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["trian", "x.py"], "no command 'trian' (did you mean 'train'?)"),
        (["train", "x.py", "--stps", "3"], "no option --stps (did you mean '--steps'?)"),
        (["plan", "x.py", "--zeor=2"], "no option --zeor (did you mean '--zero'?)"),
        (["checkpoint", "show", "x", "--tensor_s"], "(did you mean '--tensors'?)"),
        (["plan", "x.py", "--precision", "bf61"], "--precision bf61 (did you mean 'bf16'?)"),
        (["plan", "x.py", "--cp-attention", "rng"], "(did you mean 'ring'?)"),
        (["plan", "x.py", "--recompute", "expnsive"], "(did you mean 'expensive'?)"),
        (["train", "x.py", "--steps", "1", "--launch", "torchrum"], "(did you mean 'torchrun'?)"),
        (["completion", "bsh"], "(did you mean 'bash'?)"),
        (["plan", "x.py", "--device", "gpu"], "--device gpu (did you mean 'cuda'?)"),
    ],
)
def test_what_is_near_is_named(
    words: list[str], near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = _misused(capsys, *words)
    assert said.startswith("OptionError: ") and near in said and "\n  legal: " in said
    assert "usage:" not in said


def test_files_are_near_by_their_own_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("plan.json", "r.py", "mine.py"):
        (tmp_path / name).touch()
    assert main(["show", str(tmp_path / "plan.jsn")]) == 2
    assert f"(did you mean '{tmp_path / 'plan.json'}'?)" in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "mien.py")]) == 2
    assert f"(did you mean '{tmp_path / 'mine.py'}'?)" in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "quux.py")]) == 2
    assert "did you mean" not in capsys.readouterr().err


def test_an_address_is_refused_before_anything_takes_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "none.py", "--steps", "1", "--watch-at", "1.2.3"]) == 2
    assert '"127.0.0.1:8080"' in capsys.readouterr().err


def test_a_memory_limit_chooses_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    zero = ["plan", DENSE, "--dp", "4", "--zero", "3", "--microbatches", "4", "--memory-limit"]
    assert main([*zero, "1MiB"]) == 0
    assert "gathered once for a step: of what fits into 1.0 MiB" in capsys.readouterr().out
    assert main([*zero, "10KiB"]) == 2
    assert "the limit is 10.0 KiB" in capsys.readouterr().err
    assert main([*zero, "lots"]) == 2
    assert "'lots' is no size" in capsys.readouterr().err


def test_a_missing_option_and_a_wrong_value_are_one_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "x.py"]) == 2
    assert "piper train needs --steps or --epochs" in capsys.readouterr().err
    assert main(["train", "x.py", "--steps", "1", "--epochs", "1"]) == 2
    assert "--steps and --epochs" in capsys.readouterr().err
    assert "piper explain needs PLAN.json|TIMELINE" in _misused(capsys, "explain")
    said = _misused(capsys, "train", "x.py", "--steps", "many")
    assert "piper train: --steps: invalid int value: 'many'" in said


def test_a_plan_is_saved_under_a_name_that_train_knows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", MOE, "--out", "a.plan"]) == 2
    assert "--out a.plan\n  legal: a file that ends with .json" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_and_every_default(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: piper {command} ") and text.count("usage") == 1
    examples = text.partition("\nexamples:\n")[2].splitlines()
    assert examples and all("piper" in line for line in examples)
    parser = whole_parser((command,)).commands[command]
    for action in parser.actions:
        assert action.help or action.metavar == "ACTION", action.dest
        takes = action.option_strings and action.nargs != 0 and not action.required
        if takes and isinstance(action.default, int | float) and action.default:
            shown = " ".join(text.split())
            assert f"default: {action.default}" in shown, action.dest


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_of_help_are_understood(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command line in help parses; those of other programs aside."""
    epilog = whole_parser((command,)).commands[command].epilog or ""
    lines = [line.partition("#")[0].split() for line in epilog.splitlines()[1:]]
    lines = [line for line in lines if line[0] == "piper" and not {">", "JOB.toml"} & set(line)]
    assert lines or command == "completion"
    for line in lines:
        assert parsed(line[1:]).command == command


def test_help_lists_commands_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    text = capsys.readouterr().out
    assert all(re.search(rf"^  {command} +\w", text, re.MULTILINE) for command in COMMANDS)
    for title in ("train:", "before training:", "look into it:", "this machine:", "examples:"):
        assert f"\n{title}\n" in text


def _offered(script: Path, *words: str) -> list[str]:
    typed = " ".join(f"'{word}'" for word in ("piper", *words))
    lines = f"source {script}; COMP_WORDS=({typed}); COMP_CWORD={len(words)}; _piper; "
    done = subprocess.run(
        ["bash", "--norc", "-c", f'{lines} echo "${{COMPREPLY[@]}}"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_bash_completes_commands_options_and_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "piper.bash"
    script.write_text(capsys.readouterr().out)
    assert _offered(script, "tr") == ["train"]
    assert _offered(script, "train", "x.py", "--sched") == ["--schedule"]
    assert _offered(script, "train", "x.py", "--schedule", "zb") == ["zb_h1", "zb_h2", "zbv"]
    assert _offered(script, "train", "x.py", "--launch", "t") == ["torchrun"]
    assert _offered(script, "checkpoint", "c") == ["convert"]
    assert _offered(script, "train", "x.py", "--data", "x") == []  # files are the shell's to offer
    assert main(["completion", "zsh"]) == 0
    zsh = capsys.readouterr().out.splitlines()
    assert "bashcompinit" in zsh[0] and "\n".join(zsh[1:]) == script.read_text().rstrip()


def test_fish_completes_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == 0
    lines = capsys.readouterr().out.splitlines()
    options = [a for a in whole_parser(("train",)).commands["train"].actions if a.option_strings]
    mine = [line for line in lines if "seen_subcommand_from train'" in line]
    assert len(mine) == len(options) > 40
    [schedule] = [line for line in mine if " -l schedule " in line]
    assert "1f1b" in schedule and "dualpipev" in schedule
    for line in lines:  # quotes are closed: what is in them holds none that is not escaped
        assert len(re.findall(r"(?<!\\)'", line)) % 2 == 0


@pytest.mark.parametrize(
    ("options", "message", "legal"),
    [
        (["--dp", "3", "--ep", "2"], "--ep 2 does not divide --dp 3", "--ep 1, or another divisor"),
        (["--zero", "7", "--dp", "2"], "--zero 7", "--zero 0, 1, 2 or 3"),
        (["--sp"], "--sp, but no ranks share tensors", "--tp 2 or more with --sp"),
        (["--clip", "-1"], "--clip -1.0", "a norm above 0"),
        (["--cp-attention", "ring"], "--cp-attention ring", "--cp 2 or more"),
        (["--dp", "2", "--device", "cuda"], "no CUDA device", "--device cpu"),
        (["--tp", "0"], "--tp 0", "at least 1"),
    ],
)
def test_errors_speak_of_options_as_text_and_as_json(
    options: list[str], message: str, legal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", MOE, *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and message in printed.err
    assert f"\n  legal: {legal}" in printed.err and "None" not in printed.err
    assert main(["plan", MOE, *options, "--json"]) == 2
    printed = capsys.readouterr()
    [line] = printed.out.splitlines()
    found = json.loads(line)
    assert printed.err == "" and found["error"].endswith("Error")
    assert message in found["message"] and found["legal"].startswith(legal)
    facts = {"event", "error", "message", "where", "by", "requirement", "details", "legal"}
    assert set(found) == facts


def test_a_mistake_in_the_command_line_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(_misused(capsys, "plan", MOE, "--dpp", "2", "--json"))
    assert found["error"] == "OptionError" and "did you mean" in found["message"]


def test_an_error_of_the_users_code_is_json_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "broken.py"
    file.write_text("def model():\n    return 1 / 0\n\nbatch = step = model\n")
    assert main(["plan", str(file), "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert (found["error"], found["where"]) == ("ZeroDivisionError", f"{file}:2")


def _arguments(**values: Any) -> Any:
    found = parsed(["plan", "x.py"])
    vars(found).update(values)
    return found


def test_what_the_user_wrote_in_a_file_stays_in_its_words() -> None:
    call = Call("replicate", Source("/train.py", 3))
    error = MeshError("zero=7", call=call, legal="zero=0, 1, 2 or 3")
    assert in_options(error, _arguments(zero=7)).message == "zero=7"
    error = MeshError("no rank of pp=2 dp=1 has zero=7", legal="another zero")
    spoken = in_options(error, _arguments(zero=7, pp=2, dp=1))
    assert spoken.message == "no rank of pp=2 dp=1 has --zero 7"
    error = RunError("zero=2 in a plan", legal="piper.adamw(lr=0.1)")
    assert str(in_options(error, _arguments(zero=3))) == str(error)


def test_a_class_model_is_not_a_function_that_makes_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "program.py"
    file.write_text("class Model: pass\n\n\ndef batch(): ...\n\n\ndef step(model, batch): ...\n")
    assert main(["plan", str(file)]) == 2
    said = capsys.readouterr().err
    assert "does not define model()" in said and "def model(): return Model()" in said
