"""Palaestra: one agent loop, one tool registry and one pool of isolated slots, for chat, batch generation and RL."""
