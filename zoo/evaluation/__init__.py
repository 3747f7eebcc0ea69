"""Evaluation by lm-eval, with models of the zoo behind it."""
