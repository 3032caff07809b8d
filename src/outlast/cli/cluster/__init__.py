"""Commands for a cluster: installing Outlast, checking the cluster, running Outlast's processes, and rendering jobs."""
