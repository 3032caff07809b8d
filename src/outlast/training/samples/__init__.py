"""Samples for training: streams of batches, shards, and shards that are brought while training runs."""
