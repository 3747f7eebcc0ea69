"""Models as folders: safetensors, checksums, and the format of Hugging Face."""
