"""Chunks through AOTAutograd, cut into forward and backward bodies."""
