"""Recipes: whole training programs, one readable file each, to run as they are or to copy and change."""
