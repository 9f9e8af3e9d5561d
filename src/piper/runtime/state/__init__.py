"""The model's state in files: reading what a rank holds of it, and writing that."""
