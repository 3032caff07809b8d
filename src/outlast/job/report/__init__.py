"""A run's report: where its time went, and several runs side by side."""
