"""The runtime: Plans in, training steps out. It executes Tasks and knows of nothing else."""
