"""`--hypothesis-profile=thorough` writes 10,000 outputs per format instead of 100, and tries as many examples."""

from hypothesis import settings

settings.register_profile("thorough", max_examples=100_000, deadline=None, derandomize=False)
