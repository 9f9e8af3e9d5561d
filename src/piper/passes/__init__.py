"""Passes: the complete logical graph in, the physical graph and then the Plan out."""
