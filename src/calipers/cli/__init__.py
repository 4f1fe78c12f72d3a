"""The command line, one file per command; nothing heavy is imported before a command runs."""
