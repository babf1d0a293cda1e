"""Sweeps over configurations: expands a command line into runs, runs them, and writes a table and a figure."""
