"""The agents' tools. `registry/` selects tools by toolset, `runtime/` runs calls, `builtin/` has the tools
that every agent has. `tool.py` defines the types; `decorator.py` turns a function into a tool.
"""
