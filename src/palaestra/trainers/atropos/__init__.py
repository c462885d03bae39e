"""The Atropos trajectory API: environments leave scored groups at a server, a trainer takes batches of them.

The server's side: `wire` has the shapes, `events` what can happen, `exchange` what the server knows, `packing` how
batches are made up, `status` what environments are told, `store` what is kept on disk, `server` the routes. The
environment's side: `client` asks, `outgoing` is what is sent, `standing` and `feed` when.
"""
