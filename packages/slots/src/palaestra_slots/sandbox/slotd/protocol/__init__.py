"""The messages between client, server and init."""
