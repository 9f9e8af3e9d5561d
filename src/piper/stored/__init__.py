"""Tensors in files: which elements of which tensor lie in which file, without reading any."""
