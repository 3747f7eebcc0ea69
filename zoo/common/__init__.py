"""The ground that every room stands on: configurations, files and their checksums."""
