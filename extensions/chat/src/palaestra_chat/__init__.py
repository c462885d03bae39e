"""Conversations with a person: the core that all front ends share, and the front ends for terminals and editors."""
