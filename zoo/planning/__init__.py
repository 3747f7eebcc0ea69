"""What a training step needs of devices that need not be there: memory, bytes, a bound on speed."""
