"""The `palaestra` command: one module per subcommand, imported when the subcommand is used."""
