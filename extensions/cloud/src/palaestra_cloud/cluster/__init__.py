"""Runs whose groups are rolled out on the nodes of a cluster."""
