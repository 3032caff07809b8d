"""Clusters made and removed by the plan of a fleet: its steps are carried out by eksctl, kubectl and helm, and what is done
already is not done again. `outlast cluster create | status | delete` (cli/provision.py). Decision 0049."""
