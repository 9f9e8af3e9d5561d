"""Mistakes of a first hour in Python: one clear error each, with the user's line and what is legal;
or a warning, where the program is legal."""

import importlib.util
import runpy
import sys
from pathlib import Path

import pytest

from piper.errors import PiperError

HERE = Path(__file__).parent / "scripts"
WARNINGS = Path(__file__).parent / "warned"
WARNED = sorted(path.stem for path in WARNINGS.glob("*.py"))
SCRIPTS = sorted(p.stem for p in HERE.glob("*.py") if not p.stem.startswith("_"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_error_of_a_script(name: str, imported: None, pytestconfig: pytest.Config) -> None:
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    with pytest.raises(PiperError) as caught:
        spec.loader.exec_module(module)
    text = f"{type(caught.value).__name__}: {caught.value}\n"
    assert f"{name}.py:" in text, "an error names the user's line"
    assert "  legal: " in text, "an error says what is legal"
    golden = HERE / f"{name}.txt"
    if pytestconfig.getoption("--update-golden"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("name", WARNED)
def test_warning_of_a_script(
    name: str, imported: None, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    monkeypatch.chdir(WARNINGS)
    with pytest.warns(UserWarning) as caught:
        runpy.run_path(str(WARNINGS / f"{name}.py"))
    (warning,) = caught
    file = Path(warning.filename)
    assert file == WARNINGS / f"{name}.py", "a warning names the user's line"
    text = f"{file.name}:{warning.lineno}: {warning.category.__name__}: {warning.message}\n"
    golden = WARNINGS / f"{name}.txt"
    if pytestconfig.getoption("--update-golden"):
        golden.write_text(text)
    assert text == golden.read_text()
