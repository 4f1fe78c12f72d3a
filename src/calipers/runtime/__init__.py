"""Processes, devices and precision, progress and termination."""
