"""A script for torchrun: batches of several shapes, whole or each rank its rows."""

import torch
import torch.distributed as dist

import piper
from piper.strategies import parallel
from piper.training.verify import train_one_device
from tests.loopback import ragged


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    batches = ragged.batches()
    for options in ({"dp": 2, "zero": 2}, {"pp": 2, "microbatches": 2}):
        job = ragged.program().apply(parallel(**options)).lower(optimizer=piper.adamw(lr=0.01))
        wanted = train_one_device(job, batches).losses
        for data in (batches, ragged.data):
            found = piper.train(job, data, steps=None, launch="torchrun", log="none").losses
            assert len(found) == len(wanted)
            for mine, other in zip(found, wanted, strict=True):
                assert abs(mine - other) <= 1e-12 * abs(other), (options, found, wanted)
    print("as one device", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
