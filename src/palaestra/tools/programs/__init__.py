"""Programs that call tools: what lies in the slot beside such a program, and our end of its channel.

`modules` writes the functions that a program imports, `supervisor` runs it inside the slot, `channel` answers it.
"""
