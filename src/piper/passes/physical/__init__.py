"""From the logical graph to the physical one: bodies, communication, gradients, updates."""
