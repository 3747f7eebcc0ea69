"""What a corpus is prepared from: files and addresses, cut into splits and read in a stream."""
