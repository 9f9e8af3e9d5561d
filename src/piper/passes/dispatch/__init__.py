"""From the physical graph to tasks: their order, slots, waits and buffers."""
