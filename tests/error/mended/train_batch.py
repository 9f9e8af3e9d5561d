"""Data is a sequence of batches. One dictionary is one batch: as a sequence it would be its keys.

See: [data](../guide/training.md#data)
"""

from _first import batch, job

import piper

training = piper.train(job(), [batch()], steps=1, launch="loopback")
print(training.losses[-1])
