"""Tools of the contract that this version knows and does not have: their schemas, and the reason of each.

Registered like any other tool, so that toolsets, `palaestra tools` and error messages can say what is missing instead
of hiding it. Building one means moving its schema to `builtin/` and giving it a function; nothing else changes.
"""
