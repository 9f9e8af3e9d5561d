"""Code of chunks: captured pieces in, content-hashed forward and backward bodies out."""
