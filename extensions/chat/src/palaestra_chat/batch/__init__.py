"""`palaestra batch`: the agent over a file of prompts."""
