"""Samples for training: streams of batches, and shards of prepared data, which may be fetched while training runs."""
