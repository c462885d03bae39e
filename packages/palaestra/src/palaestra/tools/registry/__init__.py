"""Which tools there are, with their definitions and toolsets."""
