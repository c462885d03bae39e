"""Which isolation levels work on this machine, and the test that proves it."""
