"""Fewer batches than steps."""

from _first import batch, job

import piper

piper.train(job(), [batch()] * 2, steps=5, launch="loopback", log="none")
