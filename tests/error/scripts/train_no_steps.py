"""A training without a number of steps, on data that never ends."""

from _first import batch, job

import piper


def forever():
    while True:
        yield batch()


piper.train(job(), forever(), steps=0, launch="loopback")
