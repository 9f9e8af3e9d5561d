"""A strategy is a function of directives. `parallel` makes one of degrees, so that nobody has to
write directives for what is usual; `piper plan` prints it as code to change.

See: [strategies](../guide/strategies.md#degrees)
"""

from _first import Model, batch, step

import piper

program = piper.trace(Model, batch(), step).apply(piper.strategies.parallel(dp=2))
with program.lower().launch("loopback") as run:
    print(run.step(batch()).loss)
