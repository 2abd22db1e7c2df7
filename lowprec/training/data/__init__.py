"""From a list of files to token shards to batches."""
