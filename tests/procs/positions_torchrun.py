"""A script for torchrun: kinds of data are trained on, each from its Progress; rank 0 prints the next
ones, and on what they were trained."""

import json
import os
import sys

import torch
import torch.distributed as dist

import piper
from piper.training.progress import Progress
from tests import counted


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for kind, (steps, saved) in json.loads(sys.argv[1]).items():
        start = Progress.from_json(saved.encode())
        with counted.job(dist.get_world_size(), 8).launch("torchrun") as run:
            training = piper.train(
                run,
                counted.damaged if kind == "damaged" else counted.GIVEN[kind](),
                steps=steps,
                start=start,
                skip_unreadable=int(kind == "damaged"),
                log="none",
            )
            counts = counted.counts(run, 8).tolist()
        found[kind] = (counts, Progress(position=training.position).to_json().decode())
    if os.environ["RANK"] == "0":
        print(json.dumps(found))
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # as workers end: threads of torch may abort a process that takes its modules down


if __name__ == "__main__":
    main()
