"""The command line, one file per command; nothing heavy is imported before a command runs."""

INTERRUPTED = 130
"""The exit code after Ctrl-C."""
