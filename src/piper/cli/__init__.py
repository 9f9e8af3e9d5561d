"""The command line: a file for each command, and files for what commands share."""
