"""The ground of every room: configurations, files and their checksums."""
