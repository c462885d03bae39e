"""A tiny real model, made on the spot: for tests and first steps of everything that needs true sampling."""

from palaestra.inference.tiny.model import TinyModel, make_tiny

__all__ = ["TinyModel", "make_tiny"]
