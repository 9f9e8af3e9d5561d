"""Where code runs is not the model's to say: the same program is lowered for CPUs or GPUs. Tensors
that the code makes lie where its inputs do.

See: [launchers](../guide/launchers.md)
"""

from _first import Model, batch, step

import piper

job = piper.trace(Model, batch(), step).lower(device="cpu")  # or "cuda"
with job.launch("loopback") as run:
    print(run.step(batch()).loss)
