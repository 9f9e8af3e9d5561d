"""Regions count by themselves, in the order in which the code runs: a loop over layers gives `PP=0`,
`PP=1` and so on without a variable for it.

See: [strategies](../guide/strategies.md), [tags from
outside](../guide/start.md#a-model-that-you-do-not-want-to-touch)
"""

from _first import Model, batch, step

import piper


class Tagged(Model):
    def forward(self, x):
        with piper.annotate("PP"):
            x = self.first(x)
        return self.second(x)


job = piper.trace(Tagged, batch(), step).lower()
with job.launch("loopback") as run:
    print(run.step(batch()).loss)
