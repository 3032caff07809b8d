from outlast.client import Failed, Job, Report, Run, find, runs

__all__ = ["Failed", "Job", "Report", "Run", "find", "runs"]
__version__: str
