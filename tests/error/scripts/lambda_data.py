"""A lambda as a data function for worker processes."""

from _first import batch, job

import piper

piper.train(job(dp=2), lambda share: [batch(4)], steps=1, launch="local")
