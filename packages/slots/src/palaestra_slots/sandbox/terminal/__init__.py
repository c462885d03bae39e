"""Keys and screens of a slot's terminal."""
