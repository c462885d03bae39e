"""Functions that existing scripts call before a run and that have nothing to do here."""

from __future__ import annotations


def apply_patches() -> None:
    """Do nothing, because no library needs to be patched: tools run without event loops of their own."""


def resize_tool_pool(max_workers: int) -> None:
    """Do nothing, because tools run in the event loop and not in a pool of threads."""
