from inference.conftest import tokenizer_folder

__all__ = ["tokenizer_folder"]
