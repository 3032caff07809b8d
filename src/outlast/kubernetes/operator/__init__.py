"""The operator: what it sees of a job (`observe`), what is to be done about it (`decide`), and the doing (`act`).

See docs/decisions/0013-the-operator.md. `plan` is the word between them; `operator` is the process.
"""
