"""Train the MoE example on 4 processes: 2 pipeline ranks x 2 data ranks that share experts and state."""

import time

import moe

import piper
from piper.strategies import parallel

STEPS = 30


def main() -> None:
    program = piper.trace(moe.model, moe.batch(), moe.step)
    strategy = parallel(pp=2, dp=2, ep=2, zero=2, schedule="zb_h1", microbatches=4)
    job = program.apply(strategy).lower(optimizer=piper.adamw(lr=3e-3))
    print(job.summary())
    losses = []
    with job.launch("local") as run:
        for step in range(STEPS):
            start = time.perf_counter()
            losses.append(run.step(moe.batch(step)).loss)
            took = (time.perf_counter() - start) * 1e3
            print(f"step {step + 1:>2}/{STEPS}  loss {losses[-1]:.4f}  {took:.0f} ms", flush=True)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    if not losses[-1] < 0.7 * losses[0]:
        raise SystemExit("the loss did not fall")


if __name__ == "__main__":
    main()
