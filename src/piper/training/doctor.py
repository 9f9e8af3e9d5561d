"""doctor: what this machine has for training, measured where it can be, and what is wrong with it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import tempfile
from typing import Any

import torch

import piper
from piper.runtime.launch.mps import CONTROL
from piper.training.links import measure_links

GIB = 2**30
Problem = tuple[str, str]  # what, and what to do about it


def examine() -> dict[str, Any]:
    """Everything, as plain data; `problems` has a remedy for each."""
    problems: list[Problem] = []
    facts = {
        "versions": _versions(),
        "devices": _devices(problems),
        "links": _links(problems),
        "limits": _limits(problems),
        "compiler": _compiler(problems),
    }
    return {**facts, "problems": [{"problem": what, "do": do} for what, do in problems]}


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "piper": piper.__version__}
    found |= {
        "torch": torch.__version__,
        "numpy": _version("numpy"),
        "msgspec": _version("msgspec"),
    }
    found["ray"] = _version("ray")
    found["cuda"] = torch.version.cuda or "none: torch is built for the CPU"
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    found["driver"] = _first_line(
        "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
    )
    return found


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _first_line(*command: str) -> str:
    """What a program says, or that there is none."""
    if shutil.which(command[0]) is None:
        return f"none: {command[0]} is not here"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return f"none: {command[0]} did not answer"
    lines = (done.stdout or done.stderr).strip().splitlines()
    return lines[0] if lines else "none"


def _devices(problems: list[Problem]) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpus = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        gpus.append({"name": facts.name, "memory": total, "free": free})
        if free < 0.5 * total:
            problems.append(
                (
                    f"GPU {index} has {free / GIB:.0f} of {total / GIB:.0f} GiB free",
                    "nvidia-smi shows who holds the rest",
                )
            )
    mps = "available" if shutil.which(CONTROL) else f"no: {CONTROL} is not here"
    if not gpus:
        mps = "no: there is no GPU"
    if torch.version.cuda and not gpus:
        problems.append(
            (
                "torch is built for CUDA, but sees no GPU",
                "check nvidia-smi and CUDA_VISIBLE_DEVICES",
            )
        )
    return {"cores": cores, "memory": memory, "gpus": gpus, "mps": mps}


def _links(problems: list[Problem]) -> list[dict[str, Any]]:
    found = []
    for backend in ("gloo", "nccl") if torch.cuda.device_count() > 1 else ("gloo",):
        try:
            found += measure_links(backend)
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            problems.append(
                (
                    f"two processes cannot talk over {backend}: {error}",
                    "check the firewall and the interface lo, or set GLOO_SOCKET_IFNAME",
                )
            )
    return found


def _limits(problems: list[Problem]) -> dict[str, Any]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    shared = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    folder = tempfile.gettempdir()
    disk = shutil.disk_usage(folder)
    overcommit = "unknown"
    if os.path.exists("/proc/sys/vm/overcommit_memory"):
        with open("/proc/sys/vm/overcommit_memory") as file:
            overcommit = {"0": "heuristic", "1": "always", "2": "never"}[file.read().strip()]
    if 0 <= files < 4096:
        problems.append((f"a process may open {files} files", "ulimit -n 65536"))
    if 0 <= processes < 4096:
        problems.append((f"a user may start {processes} processes", "ulimit -u 65536"))
    if shared is not None and shared.total < GIB:
        problems.append(
            (
                f"/dev/shm has {shared.total / 2**20:.0f} MiB, which data loaders and NCCL fill",
                "in a container: --shm-size=8g",
            )
        )
    if disk.free < 2 * GIB:
        problems.append(
            (f"{folder} has {disk.free / GIB:.1f} GiB free", "set TMPDIR to a larger disk")
        )
    if overcommit == "never":
        problems.append(
            (
                "the kernel does not overcommit memory: forks may fail",
                "sysctl vm.overcommit_memory=0",
            )
        )
    return {
        "open_files": files,
        "processes": processes,
        "shared_memory": shared.total if shared else None,
        "temporary": {"folder": folder, "free": disk.free},
        "overcommit": overcommit,
    }


def _compiler(problems: list[Problem]) -> str:
    names = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    for name in filter(None, names):
        if shutil.which(name):
            return _first_line(name, "--version")
    problems.append(("there is no C++ compiler, so that --compile cannot work", "install g++"))
    return "none"
