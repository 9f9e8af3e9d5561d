"""Costs of nodes in seconds: measured where they were, estimated where they were not."""
