"""Run folders on object stores: a local working folder, and copies of it in the background."""
