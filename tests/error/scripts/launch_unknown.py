"""A launcher that there is not."""

from _first import job

job(dp=2).launch("mpi")
