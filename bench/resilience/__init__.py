"""Outlast and its peers under one fault trace, on one machine, in one run: docs/compare.md is made of the results.

    python -m bench.resilience --prepare PEERS                      environments of the peers, once
    python -m bench.resilience --short --peers PEERS --repeats 3    runs what is not in the results yet
    python -m bench.resilience --page                               writes docs/compare.md and the table of the README

`trace` says which fault comes when, `systems` how each system is started, `drive` plays the cluster, `account` makes figures of
the lines that the ranks write, and `page` makes tables of the figures. `scripts` has one training script per system.
"""
