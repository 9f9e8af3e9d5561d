"""The report of a plan or a timeline: one HTML file that needs nothing else."""
