"""Commands: how they start, end and are limited."""
