"""What an agent can do: tools, the toolsets that group them, and what binds them to slots.

`registry` says which tools there are, `toolsets` how they are grouped, `arguments` which calls may run. `binding` runs
them for one rollout, `executor` for many trajectories. `builtin` has the tools, `patching` finds places in text.
"""
