"""How a tool call is checked, runs and replies."""
