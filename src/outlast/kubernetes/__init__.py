"""Jobs in a Kubernetes cluster: the API client, the manifests, the operator, what users see of their jobs, and diagnostics."""
