"""Generators of schedules: numbers in, tables out."""
