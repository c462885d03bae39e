"""From the sealed work to a score, and whose fault a failure is."""
