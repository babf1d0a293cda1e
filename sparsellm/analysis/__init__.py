"""Measures where a trained model is sparse on real text: by layer, position, token, neuron and token tile."""

from sparsellm.analysis.study import AnalysisError, analyze_checkpoint, mistakes

__all__ = ["AnalysisError", "analyze_checkpoint", "mistakes"]
