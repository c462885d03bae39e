"""Serves a token engine of this process to others: to clients of token APIs, to chat clients, and to the nodes of a
cluster."""
