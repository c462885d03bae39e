"""The tools that ask a person, and who answers."""
