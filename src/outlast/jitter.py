"""Chance that nobody counts on: how long a pause is, which of several is taken.

It is the system's. Python's shared generator belongs to the script, which seeds it and counts on what comes next: a thread of
ours that drew from it would change what is trained. Forks share no state of the system's, either.
"""

import random

CHANCE = random.SystemRandom()
