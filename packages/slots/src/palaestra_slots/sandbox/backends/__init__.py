"""The providers of slots, one file for each."""
