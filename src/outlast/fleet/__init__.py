"""A fleet: which machines a cluster has, in which order they are taken, and the plan by which it comes to be.

    load(path)      the cluster in a file; every mistake with its line
    preset(name)    a cluster that is ready to use, by name
    plan(cluster)   files and commands, in order

Everything is pure but for reading files. `outlast cluster plan` prints plans.
"""

from __future__ import annotations

from outlast.fleet.files import PRESETS, load, parse, preset, preset_text
from outlast.fleet.model import Cluster, NodeGroup, NodePool, Nodes
from outlast.fleet.plan import plan
from outlast.fleet.steps import Check, Cost, Plan, Step

__all__ = [
    "PRESETS",
    "Check",
    "Cluster",
    "Cost",
    "NodeGroup",
    "NodePool",
    "Nodes",
    "Plan",
    "Step",
    "load",
    "parse",
    "plan",
    "preset",
    "preset_text",
]
