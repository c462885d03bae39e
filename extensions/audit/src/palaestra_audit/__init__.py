"""Checks whether the score of an environment can be trusted."""
