"""Plans of a training step for devices that need not be present: memory, bytes, speed."""
