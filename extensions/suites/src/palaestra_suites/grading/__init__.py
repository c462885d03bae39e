"""Verdicts over the work of an agent, and the controls that tell real passes from forged ones."""
