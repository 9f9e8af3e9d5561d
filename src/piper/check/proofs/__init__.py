"""The proofs: parties in, problems out."""
