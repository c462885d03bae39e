"""The earlier name of `ToolRuntime`."""

from __future__ import annotations

from palaestra.tools.runtime.runtime import ToolRuntime as SlotTools

__all__ = ["SlotTools"]
