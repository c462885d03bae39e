"""Edits text exactly at the place that a model meant, or not at all. Pure functions: nothing here touches a file."""
