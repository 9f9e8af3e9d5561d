"""Timelines as pictures: bars in time, in a terminal or as SVG."""
