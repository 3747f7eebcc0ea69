"""What every room builds on: configurations, files and their checksums."""
