"""Quality of a checkpoint: held-out cross entropy, and accuracy on seven downstream tasks."""
