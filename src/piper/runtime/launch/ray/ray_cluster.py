"""Ray's cluster: join one that runs, or start one on this machine. The only place that imports Ray."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from typing import Any

from piper.errors import RunError

PROBE_SECONDS = 5.0
CHECK_SECONDS = 60.0


def load_ray() -> Any:
    """The module, which is an extra."""
    try:
        # Ray would replace `print` in this process, which tracing then stumbles over.
        os.environ.setdefault("RAY_TQDM_PATCH_PRINT", "0")
        import ray
        import ray.cloudpickle
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise RunError(
            f"Ray is not there: {error}", legal="pip install '.[ray]' in a clone of Piper"
        ) from None
    return ray


def connect(address: str | None, *, num_cpus: int) -> bool:
    """Be connected to a cluster; whether the connection was made here, so that it is ours to end.

    Without an address: the one this process is connected to, that of RAY_ADDRESS, one that runs on
    this machine, else a new one with at least `num_cpus`.
    """
    ray = load_ray()
    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", here):
            raise RunError(
                f"this process is connected to the Ray cluster at {here}, not to {address}",
                legal=f"address={here!r}, or ray.shutdown() before",
            )
        return False
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    if address == "auto" and (recorded := _recorded()) and not _answers(recorded):
        address = "local"  # what is on record has ended
    if address not in ("auto", "local"):
        _check(address)
    quiet = {"logging_level": "warning"}
    try:
        if address != "local":
            try:
                ray.init(address=address, **quiet)
                return True
            except ConnectionError:
                if address != "auto":
                    raise
        cpus = max(os.cpu_count() or 1, num_cpus)
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)
    except Exception as error:
        ray.shutdown()
        raise RunError(f"no Ray cluster at {address}: {error}") from error
    return True


def _check(address: str) -> None:
    """Ray itself would try for many minutes to reach a cluster that is not there."""
    legal = (
        "HOST:PORT of a head node, as `ray start --head` prints it, or no address to start one here"
    )
    if not _answers(address):
        raise RunError(f"no Ray cluster at {address}: nothing answers there", legal=legal)
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        subprocess.run(command, capture_output=True, timeout=CHECK_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise RunError(
            f"no Ray cluster at {address}: what answers there is none", legal=legal
        ) from None


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return False
    with contextlib.suppress(OSError):
        socket.create_connection((host.strip("[]"), int(port)), PROBE_SECONDS).close()
        return True
    return False


def _recorded() -> str | None:
    """The cluster that `ray start` noted on this machine."""
    path = os.path.join(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    with contextlib.suppress(OSError), open(path) as file:
        return file.read().strip()
    return None
