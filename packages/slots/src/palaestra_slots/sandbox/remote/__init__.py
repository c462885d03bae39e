"""A slot server behind the streams of a command."""
