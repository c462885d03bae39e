"""How flags, files and variables become settings."""
