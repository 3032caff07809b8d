"""`launch.shim`, by the path under which agents that an earlier version started run it."""

import os
import runpy

runpy.run_path(os.path.join(os.path.dirname(__file__), "..", "launch", "shim.py"), run_name="__main__")
