"""A script for torchrun: the cells named on the command line train like one device."""

import json
import os
import sys

import torch
import torch.distributed as dist

from piper.training.verify import compare
from tests.matrix import Cell
from tests.zoo import batches_of, reference_of


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for text in sys.argv[1:]:
        cell = Cell(**json.loads(text))
        job = cell.job()
        with job.launch("torchrun") as run:
            errors = compare(run, batches_of(cell.program), reference_of(cell.program, job))
        print(f"rank {os.environ['RANK']} {cell.name}: {errors.exact}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
