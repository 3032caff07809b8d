"""What is asked of a cloud: images and their registry, volumes, dashboards. Called by the command line; knows nothing of jobs."""
