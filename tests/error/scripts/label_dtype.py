"""Labels of another dtype than those of the example batch."""

import torch
from _first import batch, job

with job().launch("loopback") as run:
    run.step({**batch(), "y": torch.zeros(8)})
