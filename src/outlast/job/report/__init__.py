"""The report of a run: where its time went, and several runs side by side."""
