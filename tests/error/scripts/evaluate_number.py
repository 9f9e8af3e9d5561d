"""Evaluation every few steps without data for it."""

from _first import batch, job

import piper

piper.train(job(), [batch()] * 2, steps=2, evaluate_every=1, launch="loopback")
