"""The rules by which the operator decides about a job, one module per situation."""
