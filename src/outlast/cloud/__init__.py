"""What a cloud has beside its clusters: registries of images. Called by the command line; knows nothing of jobs."""
