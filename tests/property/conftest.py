"""Settings of all property tests."""

from hypothesis import settings

settings.register_profile("piper", deadline=None, max_examples=200)
settings.load_profile("piper")
