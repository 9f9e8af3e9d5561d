"""The live view: the report's page of a training that goes on, served on this machine."""
