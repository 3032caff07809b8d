"""Rules of the operator's decision about a job, one module per situation."""
