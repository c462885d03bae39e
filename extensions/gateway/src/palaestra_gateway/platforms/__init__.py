"""The platforms, one module each."""
