from evaluation.conftest import bare, run, tiny, trained

__all__ = ["bare", "run", "tiny", "trained"]
