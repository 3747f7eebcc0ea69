"""Matrices of few bits: their codes and products, how they are loaded, and training in int8."""
