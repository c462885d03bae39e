"""The Atropos trajectory API: environments send scored groups to a server, and a trainer takes batches of them.

For the server, `exchange` holds the state, `trajectory_server` the routes and the store. For an environment,
`connection` registers and requests the status, `feed` sends groups, and `groups` tracks those in transit. `wire`
defines the messages.
"""
