"""The decoder and its loss."""

from sparsellm.model.decoder import Decoder, DecoderOutput

__all__ = ["Decoder", "DecoderOutput"]
