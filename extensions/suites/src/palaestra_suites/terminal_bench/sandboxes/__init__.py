"""The sandboxes of terminal tasks, with services and steps."""
