"""Where sparsity lives in a trained model, counted on real text: by layer, position, token, neuron and token tile."""

from sparsellm.analysis.study import AnalysisError, analyze_checkpoint, mistakes

__all__ = ["AnalysisError", "analyze_checkpoint", "mistakes"]
