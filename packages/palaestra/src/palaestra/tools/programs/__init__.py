"""Programs that call tools: `program_supervisor` runs one inside the slot, `host_channel` answers its calls."""
