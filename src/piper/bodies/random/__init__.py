"""Random operations as pure functions of keys."""
