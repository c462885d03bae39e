"""The styles of the chat's terminal, as escape sequences."""

from __future__ import annotations

BOLD, DIM, RED, GREEN, YELLOW, CYAN, PLAIN = (f"\x1b[{code}m" for code in ("1", "2", "31", "32", "33", "36", "0"))
PROMPT = "› "
