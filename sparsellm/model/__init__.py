"""The decoder, its loss, and its Hugging Face form."""

from sparsellm.model.decoder import Decoder, DecoderOutput

__all__ = ["Decoder", "DecoderOutput"]
