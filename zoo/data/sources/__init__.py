"""Sources of a corpus: files and addresses, cut into splits and read in a stream."""
