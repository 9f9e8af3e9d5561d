"""Directives: checked rewrites of the logical graph, each one pure function in a file of its own."""
