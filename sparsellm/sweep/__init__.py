"""Sweeps over configurations: expanding the runs, running them, and their table and figure."""
