"""The isolation levels `full` and `userns`."""
