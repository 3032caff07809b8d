"""Samples for training: streams of batches, shards, and shards that are fetched while training runs."""
