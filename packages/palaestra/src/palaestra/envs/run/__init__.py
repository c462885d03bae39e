"""The run of an environment, from its settings to its results."""
