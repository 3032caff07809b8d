"""Jobs in a cluster: the API server, manifests, the operator, jobs as a user sees them, what is wrong."""
