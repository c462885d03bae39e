"""The Atropos trajectory API: environments send scored groups to a server, a trainer takes batches of them.

The server: `exchange` holds its state, `trajectory_server` the routes and the store. The environment: `connection`
registers and asks, `feed` sends, `groups` has the groups on their way. `wire` has the shapes of both.
"""
