"""How workers start, and how they are driven."""
