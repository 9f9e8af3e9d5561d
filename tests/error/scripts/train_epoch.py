"""An argument of train misspelt."""

from _first import batch, job

import piper

piper.train(job(), [batch()], epoch=3)
