"""A script for torchrun: the program of a first hour gives, on every rank, what loopback gives."""

import os
import sys

import torch
import torch.distributed as dist

from tests.procs import first_hour


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with first_hour.job().launch("torchrun") as run:
        found = first_hour.trained(run, first_hour.batches())
    with first_hour.job().launch("loopback") as run:
        wanted = first_hour.trained(run, first_hour.batches())
    same = found[0] == wanted[0] and found[1] == wanted[1] and found[3] == wanted[3]
    print(f"alike: {same and torch.equal(found[2], wanted[2])}", flush=True)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # as workers end: threads of torch may abort a process that takes its modules down


if __name__ == "__main__":
    main()
