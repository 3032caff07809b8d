"""Commands for a cluster: install Outlast, check it, run its processes, render jobs for it."""
