"""`palaestra acp`: the conversations of `palaestra chat` for editors, over the Agent Client Protocol."""
