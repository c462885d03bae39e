"""Functions and types that scripts import from atroposlib and hermes-agent, beside the classes of environments."""
