"""The processes of one worker: the agent, what it prepares and launches, who hangs, who tracks."""
