"""What generated tasks check in the files that an agent leaves."""
