"""Ranks, their process groups, and how they hear of each other's end."""
