"""The miniature tasks, and environments over them."""

collect_ignore = ["tasks"]
