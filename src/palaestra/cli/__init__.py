"""The `palaestra` command: one file per subcommand, loaded when it is used."""
