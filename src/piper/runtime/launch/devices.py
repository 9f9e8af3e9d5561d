"""Devices: which card each rank of a machine uses."""

from __future__ import annotations

import os
import socket

import torch

from piper.errors import RunError


def devices_of(num_ranks: int, device: str, ranks_per_gpu: int = 1) -> list[str]:
    """Consecutive ranks share a card where several are to."""
    if ranks_per_gpu < 1:
        raise RunError(f"ranks_per_gpu={ranks_per_gpu}", legal="at least 1")
    if device == "cpu":
        if ranks_per_gpu > 1:
            raise RunError(
                f"ranks_per_gpu={ranks_per_gpu}, but the plan is for the CPU",
                legal='lower(device="cuda")',
            )
        return ["cpu"] * num_ranks
    cards = torch.cuda.device_count()
    if num_ranks > cards * ranks_per_gpu:
        raise RunError(
            f"{num_ranks} ranks, {ranks_per_gpu} on each GPU, but there "
            f"{'is' if cards == 1 else 'are'} {cards}",
            legal=f'ranks_per_gpu={-(-num_ranks // cards)}, or lower(device="cpu")'
            if cards
            else 'lower(device="cpu")',
        )
    return [f"cuda:{rank // ranks_per_gpu}" for rank in range(num_ranks)]


def device_facts(device: torch.device) -> dict[str, str]:
    """A device's name, an identity that no other device has, and which part of it the rank may use:
    not all of it where ranks share a card."""
    if device.type == "cpu":
        return {"name": "cpu", "identity": socket.gethostname(), "part": "1"}
    facts = torch.cuda.get_device_properties(device)
    identity = getattr(facts, "uuid", None) or f"{socket.gethostname()}:{device.index}"
    part = float(os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", 100)) / 100
    return {"name": facts.name, "identity": str(identity), "part": f"{part:g}"}
