"""`piper doctor`: versions, devices, links and limits of this machine, and what to do about them."""

from __future__ import annotations

import argparse
from typing import Any

from piper.cli.json_output import put

FAILED = 1


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        words="[options]",
        help="what this machine has for training, and lacks",
        description="Versions, devices, measured links between processes, limits; and what to do.",
        examples=("piper doctor", "piper doctor --json"),
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from piper.training.doctor import examine

    found = examine()
    if arguments.json:
        put(found)
    else:
        print(as_text(found))
    return 0 if found["links"] else FAILED


def as_text(found: dict[str, Any]) -> str:
    devices, limits = found["devices"], found["limits"]
    lines = ["versions"]
    lines += [f"  {name:<12} {version}" for name, version in found["versions"].items()]
    lines += [f"  {'C++':<12} {found['compiler']}", "devices"]
    lines.append(f"  {'cpu':<12} {devices['cores']} cores, {_size(devices['memory'])}")
    for index, gpu in enumerate(devices["gpus"]):
        size = f"{_size(gpu['memory'])}, {_size(gpu['free'])} free"
        lines.append(f"  {f'gpu {index}':<12} {gpu['name']}, {size}")
    lines += [f"  {'MPS':<12} {devices['mps']}", "links between two processes"]
    for link in found["links"]:
        speed = f"{link['microseconds']:>8.0f} us {link['gigabytes_per_second']:>8.3f} GB/s"
        lines.append(f"  {link['link']:<6} {link['operation']:<11} {link['size']:>7} {speed}")
    lines += [
        "limits",
        f"  open files   {_number(limits['open_files'])}",
        f"  processes    {_number(limits['processes'])}",
        f"  /dev/shm     {_size(limits['shared_memory'])}",
        f"  temporary    {_size(limits['temporary']['free'])} free in {limits['temporary']['folder']}",
        f"  overcommit   {limits['overcommit']}",
    ]
    lines += ["problems"] if found["problems"] else ["no problems found"]
    lines += [f"  {item['problem']}\n    do: {item['do']}" for item in found["problems"]]
    return "\n".join(lines)


def _number(limit: int) -> str:
    return "no limit" if limit < 0 else str(limit)


def _size(number: int | None) -> str:
    if number is None:
        return "none"
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"
