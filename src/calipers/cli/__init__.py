"""The command line, one file per command; nothing heavy is imported before a command runs."""

INTERRUPTED = 130
"""The exit code after Ctrl-C."""

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables that say how the threads of OpenMP wait for each other; the first is the standard."""
