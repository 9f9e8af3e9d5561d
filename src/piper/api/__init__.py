"""The user's objects: Program, Job and Run."""
