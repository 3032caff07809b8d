"""Jobs in a Kubernetes cluster: API client, manifests, operator, users' view of jobs, and diagnosis."""
