"""Sealed changes as layers, and slots over them."""
