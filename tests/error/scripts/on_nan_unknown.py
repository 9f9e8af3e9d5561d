"""A policy for NaN that there is not."""

from _first import batch, job

import piper

piper.train(job(), [batch()], steps=1, launch="loopback", on_nan="ignore")
