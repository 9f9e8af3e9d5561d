"""Graphs and their parts as text, JSON and code, and what differs between two."""
