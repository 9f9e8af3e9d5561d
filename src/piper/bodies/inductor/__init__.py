"""Bodies through Inductor, kept on disk."""
