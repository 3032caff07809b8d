"""The rules behind the operator's decisions, one module per situation."""
