"""From files to batches on the devices: documents, tokens, rows, and batch k as a function of k."""
