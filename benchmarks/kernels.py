"""Profiler traces of ranks in, where their devices' time goes out: kernels by name, and idle time by
what ended it. The device waited for its host if the kernel behind a gap was launched after the gap
began.

    python benchmarks/kernels.py FOLDER/rank0.json.gz ...
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

TOP = 22
WIDTH = 90  # of a kernel's name


def _read(path: str) -> list[dict[str, Any]]:
    data = Path(path).read_bytes()
    found: list[dict[str, Any]] = json.loads(
        gzip.decompress(data) if path.endswith(".gz") else data
    )["traceEvents"]
    return found


def _short(name: str) -> str:
    return re.sub(r"^void |at::native::|\(anonymous namespace\)::|<unnamed>::", "", name)[:WIDTH]


def report(path: str) -> str:
    events = [event for event in _read(path) if event.get("ph") == "X"]
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event["args"]
    }
    work = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    work.sort(key=lambda event: event["ts"])
    if not work:
        return f"{path}: no kernels"
    took: Counter[str] = Counter()
    num: Counter[str] = Counter()
    for event in work:
        took[_short(event["name"])] += event["dur"]
        num[_short(event["name"])] += 1
    gaps: defaultdict[str, float] = defaultdict(float)
    end = work[0]["ts"]
    for event in work:
        if event["ts"] > end:
            issued = launched.get(event["args"].get("correlation"), 0)
            waited = min(max(issued - end, 0), event["ts"] - end)
            gaps["for its host"] += waited
            gaps["for others, or to begin"] += event["ts"] - end - waited
        end = max(end, event["ts"] + event["dur"])
    span = end - work[0]["ts"]
    lines = [
        f"{path}: {len(work)} kernels in {span / 1e3:.1f} ms, idle "
        + ", ".join(f"{name} {us / 1e3:.1f} ms" for name, us in gaps.items())
    ]
    for name, us in took.most_common(TOP):
        lines.append(f"  {us / 1e3:9.2f} ms {num[name]:6d} x {us / num[name]:9.1f} us  {name}")
    return "\n".join(lines)


if __name__ == "__main__":
    for path in sys.argv[1:]:
        print(report(path))
