"""Text from a model: decoders, their caches, sampling and beam search."""
