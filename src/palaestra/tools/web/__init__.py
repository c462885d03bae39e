"""The web for tools: `base` is what a provider is, `providers` has a file for each, `reading` does without them."""
