"""How a killed run and its rollouts continue from the journal."""
