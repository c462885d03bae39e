"""One file for each family of formats of tool calls."""
