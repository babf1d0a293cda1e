"""Running a trained model: accelerating Hugging Face models, choosing engines, and generating text."""
