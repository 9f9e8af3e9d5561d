"""A number of steps is a promise about the data. Data that ends may be read in several epochs, or be
what decides the number of steps.

See: [training](../guide/training.md)
"""

from _first import batch, job

import piper

training = piper.train(job(), [batch()] * 2, epochs=3, launch="loopback", log="none")
print(training.losses[-1])
