"""`--hypothesis-profile=thorough` writes 10,000 outputs per format instead of 25."""

from hypothesis import settings

settings.register_profile("thorough", max_examples=40_000, deadline=None)
