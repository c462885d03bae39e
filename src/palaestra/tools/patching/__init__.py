"""Edits text exactly where a model meant it, or not at all. Pure functions: nothing here touches a file."""
