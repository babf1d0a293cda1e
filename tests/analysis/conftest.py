from evaluation.conftest import trained

__all__ = ["trained"]
