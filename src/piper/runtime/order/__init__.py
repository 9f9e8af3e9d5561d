"""In which order, and behind what, a rank dispatches its Tasks."""
