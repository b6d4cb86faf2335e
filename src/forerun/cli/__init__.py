"""The `forerun` command, one file per subcommand."""
