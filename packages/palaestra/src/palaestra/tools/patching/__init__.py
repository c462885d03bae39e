"""Edits text exactly at the position that a model meant, or not at all. All functions are pure: nothing here touches a
file."""
