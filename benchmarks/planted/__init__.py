"""Sound tasks of five forms, and copies with one fault each, which judge `palaestra audit`."""
