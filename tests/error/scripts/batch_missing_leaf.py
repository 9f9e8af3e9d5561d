"""A batch without labels."""

import torch
from _first import job

with job().launch("loopback") as run:
    run.step({"x": torch.ones(8, 6)})
