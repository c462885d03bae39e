"""The networks of slots, and the hosts that they may reach."""
