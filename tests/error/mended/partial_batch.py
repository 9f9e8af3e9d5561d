"""The last batch of an epoch is often smaller. `piper.train` leaves out a last one that does not
divide; a loop of your own has a loader that does.

See: [batches of other shapes](../guide/model.md#batches-of-other-shapes)
"""

from _first import batch, job
from torch.utils.data import DataLoader

rows = [{name: leaf[0] for name, leaf in batch(1).items()} for _ in range(14)]
with job(dp=2, microbatches=2).launch("loopback") as run:
    for part in DataLoader(rows, batch_size=8, drop_last=True):
        print(run.step(part).loss)
