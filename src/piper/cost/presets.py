"""Presets: machines by name, from what their makers publish; a calibration replaces their guesses.

Rates of matrix products are the published dense peaks (`cost/hardware.py`) times what large products
reach; bandwidths are published ones, each way; latencies and host times are typical of NCCL and of
PyTorch's eager dispatch, and are what a calibration should replace first.
"""

from __future__ import annotations

import msgspec

from piper.cost.hardware import peak_flops
from piper.cost.machine import Link, Machine
from piper.errors import FileError, did_you_mean

REACHED = 0.7  # of its peak, by large matrix products
_DTYPES = ("bfloat16", "float16", "float32", "float64")
_NVLINK = 10e-6  # seconds a round, NCCL between GPUs of a node
_NETWORK = 20e-6
_OF_NETWORK = "; network: "  # in a source

# Bytes a second each way.
NETWORKS = {
    "infiniband-ndr": (50e9, "400 Gb/s a port, one port a GPU (NVIDIA Quantum-2 data sheet)"),
    "infiniband-xdr": (100e9, "800 Gb/s a port, one port a GPU (NVIDIA Quantum-X800 data sheet)"),
    "infiniband-hdr": (25e9, "200 Gb/s a port (NVIDIA Quantum data sheet)"),
    "efa-p5": (50e9, "3,200 Gb/s a node of 8 GPUs (AWS, EC2 P5)"),
    "roce-100g": (12.5e9, "100 Gb/s a GPU"),
    "ethernet-25g": (3.1e9, "25 Gb/s a GPU"),
    "ethernet-10g": (1.2e9, "10 Gb/s a GPU"),
}


def _device(
    name: str, *, memory: float, nvlink: float, sms: int, ranks: int, network: str, source: str
) -> Machine:
    bandwidth, of_network = NETWORKS[network]
    peaks = {dtype: peak_flops(name, dtype) for dtype in _DTYPES}
    return Machine(
        name=name,
        flops={dtype: peak * REACHED for dtype, peak in peaks.items() if peak},
        bandwidth=memory * 0.9,
        node=Link(_NVLINK, nvlink * 0.8, share=16 / sms),
        network=Link(_NETWORK, bandwidth * 0.9, share=16 / sms),
        ranks_per_node=ranks,
        launch=4e-6,
        dispatch=12e-6,
        exchange=20e-6,
        between=300e-6,
        sms=sms,
        source=f"{source}{_OF_NETWORK}{of_network}",
    )


MACHINES: dict[str, Machine] = {
    "a100": _device(
        "A100", memory=2.04e12, nvlink=300e9, sms=108, ranks=8, network="infiniband-hdr",
        source="NVIDIA A100 80 GB SXM data sheet: 2,039 GB/s, NVLink 600 GB/s both ways",
    ),
    "h100": _device(
        "H100", memory=3.35e12, nvlink=450e9, sms=132, ranks=8, network="infiniband-ndr",
        source="NVIDIA H100 SXM data sheet: 3.35 TB/s, NVLink 900 GB/s both ways",
    ),
    "h200": _device(
        "H200", memory=4.8e12, nvlink=450e9, sms=132, ranks=8, network="infiniband-ndr",
        source="NVIDIA H200 SXM data sheet: 4.8 TB/s, NVLink 900 GB/s both ways",
    ),
    "b200": _device(
        "B200", memory=8e12, nvlink=900e9, sms=148, ranks=8, network="infiniband-ndr",
        source="NVIDIA DGX B200 data sheet: 64 TB/s for 8 GPUs, NVLink 14.4 TB/s for 8 GPUs",
    ),
    "cpu": Machine(
        "cpu", {"float32": 50e9, "float64": 25e9, "bfloat16": 10e9}, 10e9,
        node=Link(100e-6, 1.5e9, share=0.5), network=Link(200e-6, 1.2e9, share=0.5),
        ranks_per_node=64, launch=20e-6, exchange=60e-6, between=300e-6, host_computes=True,
        holds_share=False, source="one core of a server and gloo over loopback; a guess: calibrate",
    ),
}  # fmt: skip


def machine(name: str, *, network: str | None = None, ranks_per_node: int | None = None) -> Machine:
    """A preset, with another network or another number of ranks a node where they are given."""
    found = MACHINES.get(name.lower())
    if found is None:
        raise FileError(
            f"no machine is called {name!r}{did_you_mean(name, list(MACHINES))}",
            legal=f"{', '.join(MACHINES)}, or a file that `piper profile` wrote",
        )
    if network is not None:
        if network not in NETWORKS:
            raise FileError(
                f"no network is called {network!r}{did_you_mean(network, list(NETWORKS))}",
                legal=", ".join(NETWORKS),
            )
        bandwidth, of_network = NETWORKS[network]
        link = msgspec.structs.replace(found.network, bandwidth=bandwidth * 0.9)
        source = found.source.partition(_OF_NETWORK)[0] + _OF_NETWORK + of_network
        found = msgspec.structs.replace(found, network=link, source=source)
    if ranks_per_node is not None:
        found = msgspec.structs.replace(found, ranks_per_node=ranks_per_node)
    return found
