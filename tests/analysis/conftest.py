from evaluation.conftest import tiny, trained

__all__ = ["tiny", "trained"]
