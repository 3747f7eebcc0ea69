"""Prepared corpora: the token ids of documents in shards on disk, behind a manifest."""
