"""Pages of docs that benchmarks write: one section for each machine that they ran on."""

from __future__ import annotations

import re
from pathlib import Path

import torch


def write_section(page: Path, title: str, lines: list[str]) -> None:
    """Replaces the section of that title, or adds it."""
    section = f"## {title}\n\nWith torch {torch.__version__}.\n\n" + "\n".join(lines) + "\n"
    text = page.read_text()
    found = re.search(rf"## {re.escape(title)}\n.*?(?=\n## |\Z)", text, re.DOTALL)
    page.write_text(text.replace(found[0], section) if found else f"{text.rstrip()}\n\n{section}")
