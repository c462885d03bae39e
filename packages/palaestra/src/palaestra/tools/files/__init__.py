"""Files of a slot as text: reading, writing, matching names and checking syntax."""
