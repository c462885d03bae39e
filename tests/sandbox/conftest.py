"""The fixtures with real slots, for the tests of sandboxes that need more than slots."""

from sandbox.conftest import on_full, slot_servers

__all__ = ["on_full", "slot_servers"]
