"""Turns raw files into datasets: text, images, records and videos become the shards of `data.shard_format`.

Each kind has a module (`text`, `images`, `jsonl`, `video`) with a function `prepare(request, ...)`, which returns the manifest.
The modules share `source_files` (files, their order, and units of work, as pure functions) and `work_units` (processes that do
the units and record each result, so that a killed run can continue). The resulting bytes depend only on the source and the
settings, not on the number of processes or on interruptions.
"""
