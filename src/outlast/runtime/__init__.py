"""Old names of modules, for processes that run while Outlast is upgraded in place. May go with version 0.2."""
