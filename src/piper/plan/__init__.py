"""Plans: what every rank does, as data."""
