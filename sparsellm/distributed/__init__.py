"""Ranks, their process groups, and how a rank learns that another one failed."""
