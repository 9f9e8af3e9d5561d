"""The model of peers.py as a file for `piper profile`, which measures the machine for its choices:

piper profile benchmarks/large_model.py --dp 4 --zero 3 --microbatches 2 --precision bf16 \\
    --device cuda --ranks-per-gpu 4 --out machine.json
python benchmarks/peers.py --machine machine.json --json peers-gpu.json
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from shared_gpu import LARGE
from torch import nn
from transformer import Batch, Transformer, make_batch
from transformer import step as step

SIZES = replace(LARGE, dtype="float32")  # the precision says what it computes in


def model() -> nn.Module:
    return Transformer(SIZES, 1)


def batch() -> Batch:
    return make_batch(SIZES)
