"""The simulator: a plan and a machine in, the Timeline that its tasks would have out."""
