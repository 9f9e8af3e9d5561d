"""A script for torchrun: weights of a file and of a state_dict come in, and go out into a folder."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from piper.errors import FileError
from piper.strategies import parallel
from tests.zoo import ADAMW, program_of


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    state = torch.load(folder / "w.pt")
    program = program_of("moe").apply(parallel(pp=2, dp=2, ep=2, zero=3, microbatches=2))
    good = True
    for weights in (folder / "w.pt", state):
        with program.lower(weights=weights, optimizer=ADAMW).launch("torchrun") as run:
            found = run.state_dict()
            good = good and all(torch.equal(found[name], state[name]) for name in state)
            try:
                run.save_weights(folder / "w.pt")
            except FileError as error:
                good = good and "cannot be written" in error.message
            else:
                good = False
            run.save_weights(folder / "out")
    print("as it was" if good else "otherwise", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
