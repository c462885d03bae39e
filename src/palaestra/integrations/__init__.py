"""Adapters for trainers of other packages, written against the public names of `palaestra`. Nothing imports them."""
