"""The desk that the tests of built-in tools share."""

from tools.desk import at_desk

__all__ = ["at_desk"]
