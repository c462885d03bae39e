"""The isolation levels `confined` and `none`."""
