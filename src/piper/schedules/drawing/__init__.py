"""Tables and their replays as pictures."""
