"""Processes and threads that tests start, interrupt and fork."""
