"""Jobs on Kubernetes, as the command line sees them: the backend behind `outlast submit`."""
