"""What happened in a step on each rank, or is predicted to: one Timeline for both, and its pictures."""
