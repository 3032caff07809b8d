"""Jobs on this machine: the backend behind `outlast run`."""
