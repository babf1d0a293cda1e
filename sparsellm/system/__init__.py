"""Files, locks, processes and the console."""
