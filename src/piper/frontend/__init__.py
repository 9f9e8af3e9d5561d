"""From the user's model to the logical graph: annotate, capture, cut into chunks, build."""
