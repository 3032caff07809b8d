"""Jobs on Kubernetes as the command line sees them."""
