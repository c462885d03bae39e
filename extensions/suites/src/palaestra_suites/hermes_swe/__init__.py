"""Programming tasks with hidden tests, as rows of Hermes have them."""
