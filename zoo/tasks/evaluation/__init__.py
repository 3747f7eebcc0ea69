"""Evaluation of language models on tasks: by log-likelihoods, by generated answers, by text."""
