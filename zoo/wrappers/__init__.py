"""Wrappers around a model of any family: ensembles, low-rank adapters, a classification head."""
