"""A script for torchrun: the cells named on the command line train like one device."""

import json
import os
import sys

import torch
import torch.distributed as dist

from piper.training.verify import compare, train
from tests.matrix import Cell
from tests.zoo import batches_of, reference_of


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for text in sys.argv[1:]:
        cell = Cell(**json.loads(text))
        job = cell.job()
        batches = batches_of(cell.program)
        with job.launch("torchrun") as run:
            if os.environ["RANK"] == "0":
                exact = compare(run, batches, reference_of(cell.program, job)).exact
            else:  # the same calls, without one device beside them
                found = train(run, batches)
                exact = len(found.losses) == len(batches) and not run.differing_replicas()
        print(f"rank {os.environ['RANK']} {cell.name}: {exact}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
