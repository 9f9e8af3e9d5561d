"""Timelines in the formats of trace viewers."""
