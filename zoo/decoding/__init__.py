"""Text from a model: what a decoder is, its cache, sampling and beam search."""
