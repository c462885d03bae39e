"""How environments are written, configured and run."""
