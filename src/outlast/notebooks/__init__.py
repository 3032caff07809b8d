"""Notebooks: the first one, and JupyterLab to run it in."""
