"""Train the language model of moe_lm.py on 4 processes: pipeline x experts x ZeRO-2 under DualPipeV.

The same from the command line:

    piper train examples/moe_lm.py --pp 2 --dp 2 --ep 2 --zero 2 --schedule dualpipev \\
        --microbatches 4 --clip 1 --steps 60 --evaluate-every 30
"""

import moe_lm

import piper
from piper.strategies import parallel

STEPS = 60
PAGE = "demo.html"


def main() -> None:
    piper.warm_up()
    program = piper.trace(moe_lm.model, moe_lm.batch(), moe_lm.step)
    strategy = parallel(pp=2, dp=2, ep=2, zero=2, schedule="dualpipev", microbatches=4)
    job = program.apply(strategy).lower(optimizer=moe_lm.optimizer, clip=1.0)
    print("the 2 data ranks of a stage share its experts: dp=2 with ep=2 is a mesh of dp=1 x ep=2")
    print(job.summary())
    training = piper.train(
        job,
        moe_lm.data,
        steps=STEPS,
        lr_schedule=moe_lm.lr_schedule,
        evaluate=moe_lm.validation,
        evaluate_every=STEPS // 2,
    )
    held_out = training.evaluation
    if not (training.loss < 0.6 * training.losses[0] and held_out and held_out < 3.0):
        raise SystemExit("the loss did not fall")
    bits = held_out / 0.6931
    print(f"{bits:.2f} bits a byte on lines that it has never seen; a guess would be 8")
    job.show(PAGE)
    print(f"{PAGE} shows its step to a browser; docs/lessons explains all of it")


if __name__ == "__main__":
    main()
