"""The card of a job in a notebook: the report is in it, and works once it is opened."""

from __future__ import annotations

from pathlib import Path

from examples import moe_lm

import piper
from piper.strategies import parallel

from .chromium import Chromium


def test_the_report_in_a_card(chromium: Chromium, tmp_path: Path, screenshots: Path) -> None:
    program = piper.trace(moe_lm.model, moe_lm.batch(), moe_lm.step)
    job = program.apply(parallel(pp=2, dp=2, ep=2, microbatches=4)).lower()
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<!doctype html><html data-ready=yes>{job._repr_html_()}</html>")
    chromium.open(notebook)
    assert chromium.evaluate("document.querySelector('iframe').checkVisibility()") is False
    chromium.do("choose", selector="summary")
    wide = "piper.pictures.timeline.canvas.getBoundingClientRect().width"
    until = f"new Promise((done) => setInterval(() => window.piper && {wide} > 500 && done(1), 30))"
    assert chromium.do("evaluate", frame=1, code=until) == 1
    assert "1F1B" in chromium.do("evaluate", frame=1, code="document.querySelector('h1').innerText")
    own = "(() => { try { return !parent.document; } catch { return true; } })()"
    assert chromium.do("evaluate", frame=1, code=own)  # it does not see the notebook
    chromium.evaluate("document.querySelector('iframe').scrollIntoView()")
    chromium.do("picture", path=f"{screenshots}/notebook.png")
