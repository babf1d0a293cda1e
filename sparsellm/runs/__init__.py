"""What a run leaves on disk: its folder, checkpoints, metrics, curves, report, and Weights & Biases record."""
