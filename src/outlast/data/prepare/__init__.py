"""Datasets made from raw files: text, images, records and videos become the shards of `data.shards`.

A module per kind (`text`, `images`, `jsonl`, `video`), each with a function `prepare(request, ...)` that returns the manifest.
They share `plan` (files, their order, and units of work, as pure functions) and `work` (processes that do the units and note each
result, so that a killed run can continue). The resulting bytes depend only on the source and the settings, not on the number of
processes or on interruptions.
"""
