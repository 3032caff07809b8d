"""Jobs on Kubernetes, seen from outside: the backend behind `outlast submit`."""
