"""The operator observes a job (`observed_job`), decides what to do (`decide`), and does it (`apply`).

See docs/decisions/0013-the-operator.md. `decide` hands a `plan` to `apply`; `operator` is the process.
"""
