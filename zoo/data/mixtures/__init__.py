"""Mixtures of sources: which of them gives a row is a closed form of the row's number."""
