"""Hypothesis profile of this folder: numerical work is slow under load, so there is no deadline."""

from hypothesis import settings

settings.register_profile("theory", deadline=None, max_examples=40)
settings.load_profile("theory")
