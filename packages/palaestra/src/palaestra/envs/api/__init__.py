"""What an author writes, as a function with hooks or as a class."""
