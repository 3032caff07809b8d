"""A job as data: its file, its status, its ledger and report, its code, and the names that all processes agree on."""
