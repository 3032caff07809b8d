"""`agent.start`, by the name under which processes that an earlier version started call it."""

import runpy

runpy.run_module("outlast.agent.start", run_name="__main__", alter_sys=True)
