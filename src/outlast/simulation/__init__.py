"""What a job would cost on machines that come and go: a spot trace, a job's profile and a choice of fleets, played through.

Pure: `traces` has the machines that there are, `profile` how fast the job is, `run` plays one job through one trace, `choices`
compares settings. Decision 0048 says what is left out. `outlast simulate` (cli/simulate.py) prints it.
"""
