"""Degrees that are not the number of processes."""

import os

from _first import job

address = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "4"}
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="4", **address)  # as torchrun does
job(pp=2).launch("torchrun")
