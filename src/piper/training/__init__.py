"""Training: the loop, what it reads and prints; a job compared with one device; the doctor."""
