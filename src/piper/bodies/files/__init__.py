"""Bodies as data: written, read within an allow-list, and run."""
