"""Turns a corpus into tokens, tokens into blocks, and blocks into training batches."""

from sparsellm.data.errors import DataError
from sparsellm.data.manifest import Manifest
from sparsellm.data.open import Data, mistakes, open_data, open_validation
from sparsellm.data.preparation import prepare
from sparsellm.data.request import Request

__all__ = ["Data", "DataError", "Manifest", "Request", "mistakes", "open_data", "open_validation", "prepare"]
