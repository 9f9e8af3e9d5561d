"""Each data rank gets the same number of rows, and each microbatch, too: rows have to divide by data
ranks x microbatches.

See: [split](../directives/split.md), [batches of other
shapes](../guide/model.md#batches-of-other-shapes)
"""

from _first import Model, batch, step

import piper

program = piper.trace(Model, batch(), step)
job = program.apply(piper.strategies.parallel(dp=2, microbatches=4)).lower()
with job.launch("loopback") as run:
    print(run.step(batch()).loss)
