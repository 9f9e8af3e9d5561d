"""Hardware: a device's name and a dtype in, its peak of floating-point operations a second out."""

from __future__ import annotations

# Dense matrix products, as makers publish them. A name is found by the first pattern in it.
_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    ("B200", {"bfloat16": 2250e12, "float32": 80e12, "float64": 40e12}),
    ("H200", {"bfloat16": 989e12, "float32": 67e12, "float64": 67e12}),
    ("GH200", {"bfloat16": 989e12, "float32": 67e12, "float64": 67e12}),
    ("H100 PCIe", {"bfloat16": 756e12, "float32": 51e12, "float64": 51e12}),
    ("H100 NVL", {"bfloat16": 835e12, "float32": 60e12, "float64": 60e12}),
    ("H100", {"bfloat16": 989e12, "float32": 67e12, "float64": 67e12}),
    ("H800", {"bfloat16": 989e12, "float32": 67e12, "float64": 1e12}),
    ("A100", {"bfloat16": 312e12, "float32": 19.5e12, "float64": 19.5e12}),
    ("A800", {"bfloat16": 312e12, "float32": 19.5e12, "float64": 19.5e12}),
    ("A40", {"bfloat16": 149.7e12, "float32": 37.4e12}),
    ("A10G", {"bfloat16": 70e12, "float32": 31.5e12}),
    ("A10", {"bfloat16": 125e12, "float32": 31.2e12}),
    ("L40S", {"bfloat16": 362e12, "float32": 91.6e12}),
    ("L4", {"bfloat16": 121e12, "float32": 30.3e12}),
    ("RTX 4090", {"bfloat16": 165.2e12, "float32": 82.6e12}),
    ("RTX 3090", {"bfloat16": 71e12, "float32": 35.6e12}),
    ("V100", {"float16": 125e12, "float32": 15.7e12, "float64": 7.8e12}),
    ("T4", {"float16": 65e12, "float32": 8.1e12}),
)


def peak_flops(name: str, dtype: str) -> float | None:
    """Of one device, or None if it is not known. float32 is meant without TF32."""
    for pattern, peaks in _PEAKS:
        if pattern in name:
            half = peaks.get("bfloat16") if dtype == "float16" else None
            return peaks.get(dtype, half)
    return None
