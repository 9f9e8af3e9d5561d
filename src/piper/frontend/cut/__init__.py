"""Where a captured graph is cut: regions, stages, chunks and pieces."""
