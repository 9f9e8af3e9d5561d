"""From the user's model and step to one captured graph."""
