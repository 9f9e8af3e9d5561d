"""A model in place of a job."""

from _first import Model, batch

import piper

piper.train(Model(), [batch()], steps=1, launch="loopback")
