"""`.item()` stops the device until the number is known on the host, and no graph can hold what the
host then does. A tensor of one element does the same without leaving the device.

See: [what your model and step may do](../guide/model.md)
"""

from _first import Model, batch, step

import piper


class Scaled(Model):
    def forward(self, x):
        return super().forward(x) / x.abs().max()


job = piper.trace(Scaled, batch(), step).lower()
with job.launch("loopback") as run:
    print(run.step(batch()).loss)
