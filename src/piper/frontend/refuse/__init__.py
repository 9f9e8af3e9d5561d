"""What a step or a model may not do, refused with the user's line."""
