"""What went wrong, where, and whose fault it was."""
