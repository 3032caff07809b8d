"""Turns raw files into datasets: text, images, records and videos become shards as defined in `data.shard_format`.

Each kind has a module (`text`, `images`, `jsonl`, `video`) with a function `prepare(request, ...)`, which returns the manifest.
The output depends only on the source and the settings, not on the number of processes or on interruptions.
"""
