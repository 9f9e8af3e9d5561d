"""Tensor parallelism of one chunk: its code and layouts in, pieces as one rank runs them out."""
