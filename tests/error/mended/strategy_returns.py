"""`parallel(dp=2)` is a strategy itself, a function of `s`. Inside of another one it has to be
called.

See: [strategies](../guide/strategies.md)
"""

from _first import Model, batch, step

import piper


def strategy(s):
    piper.strategies.parallel(dp=2)(s)


program = piper.trace(Model, batch(), step).apply(strategy)
with program.lower().launch("loopback") as run:
    print(run.step(batch()).loss)
