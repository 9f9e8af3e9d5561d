"""Illegal programs: one clear error each, exit code 2, no traceback. `--update-golden` rewrites them."""

from pathlib import Path

import pytest

from piper.cli.main import main

HERE = Path(__file__).parent / "programs"
PROGRAMS = sorted(p.stem for p in HERE.glob("*.py") if not p.stem.startswith("_"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_error_text(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    pytestconfig: pytest.Config,
) -> None:
    monkeypatch.chdir(HERE)
    monkeypatch.syspath_prepend(str(HERE))
    assert main(["plan", f"{name}.py"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    assert f"{name}.py" in printed.err, "an error names the user's file"
    golden = HERE / f"{name}.txt"
    if pytestconfig.getoption("--update-golden"):
        golden.write_text(printed.err)
    assert printed.err == golden.read_text()


def test_debug_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(HERE)
    monkeypatch.syspath_prepend(str(HERE))
    assert main(["plan", "unknown_tag.py", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["nothing.py"], "there is no file nothing.py"),
        (["_model.py", "--pp", "3"], "2 regions do not divide over the 3 stages of schedule 1f1b"),
        (["_model.py", "--dp", "3", "--ep", "2"], "--ep 2 does not divide --dp 3"),
        (["_model.py", "--pp", "2", "--schedule", "2f2b"], "did you mean '1f1b'?"),
        (["_model.py", "--pp", "0"], "--pp 0"),
        (["_model.py", "--pp", "2", "--strategy", "two_slices.py"], "exclude each other"),
        (["_model.py", "--weights", "nothing.pt"], "there is no file"),
        (["_model.py", "--weights", "_model.py"], "is no safetensors file"),
        (["_model.py", "--dp", "5"], "a batch of 8 does not divide into 5 data ranks"),
    ],
)
def test_command_line(
    options: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(HERE)
    monkeypatch.syspath_prepend(str(HERE))
    assert main(["plan", *options]) == 2
    assert words in capsys.readouterr().err
