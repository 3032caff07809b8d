"""A job as data: its file, its status, its ledger and report, its code, and the contract between its processes."""
