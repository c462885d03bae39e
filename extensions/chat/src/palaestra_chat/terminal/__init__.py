"""`palaestra chat` in a terminal: the prompt, the live line, what is shown, and the commands."""
