"""Quality of a checkpoint."""
