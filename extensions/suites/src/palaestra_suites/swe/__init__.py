"""Bug-fixing tasks: rows of SWE data sets, their repositories and their scores."""
