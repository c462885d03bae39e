"""Conversations with a person: the core that the terminal, editors and the gateway share, and the first two of them."""
