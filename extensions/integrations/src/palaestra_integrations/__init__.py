"""Adapters for trainers of other packages, written against the public names of `palaestra`. No other module imports
them."""
