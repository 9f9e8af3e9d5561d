"""Training: so far, a job's training compared with one device's."""
