"""Tools of agents. `registry/` has tools and toolsets, `runtime/` runs calls, `builtin/` has the tools themselves, and
`serving/` offers them over HTTP. `tool.py` is the vocabulary; `decorator.py` makes a tool of a function.
"""
