"""One batch in place of batches."""

from _first import batch, job

import piper

piper.train(job(), batch(), steps=1, launch="loopback")
