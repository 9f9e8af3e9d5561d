"""A step of a job that no ranks were launched for."""

from _first import batch, job

job().step(batch())
