"""Models for other engines: GGUF for llama.cpp, and programs of StableHLO."""
