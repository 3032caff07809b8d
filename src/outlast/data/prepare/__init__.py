"""Datasets made from raw files: text, images, records and videos become the shards of `data.shards`.

A module per kind (`text`, `images`, `jsonl`, `video`), each with a function `prepare(request, ...)` that returns the manifest.
They share `plan` (files, their order, units of work: pure) and `work` (processes do the units and note each result, so that a
killed run continues). The bytes depend on the source and the settings alone, not on the number of processes, nor on kills.
"""
