"""The Atropos trajectory API: environments leave scored groups at a server, a trainer takes batches of them.

`wire` has the shapes, `exchange` what the server knows, `store` what it keeps on disk, `server` the routes; `client`
speaks to such a server, `feed` is the environment's side of it.
"""
