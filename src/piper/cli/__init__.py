"""The command line: `piper plan` and `piper verify`."""
