"""The job file: one frozen model that reads it, validates it, and describes it to editors and in the reference.

    load(path)   the job in a file, with its relative paths made absolute
    parse(text)  the job in YAML text
    of(fields)   the job in an API server's object
    dump(job)    YAML that parses back to an equal job
    schema()     JSON schema, for editors

These functions return a complete, consistent job or raise `InvalidJob` with every mistake and its line. Attributes are
snake_case, and names in the file are camelCase. The heaviest import in this package is pydantic.
"""

from __future__ import annotations

from outlast.job.spec.job_file import absent, anchor, code_of, dump, load, no_such_file, of, parse, schema, text, without_secrets
from outlast.job.spec.locations import ARCHIVES, STORES, archive, local, pinned, web
from outlast.job.spec.model import OWN, Checkpoint, Environment, Job, Metadata, Rendezvous, Resources, Restarts, Spec, Workers

__all__ = [
    "ARCHIVES",
    "OWN",
    "STORES",
    "Checkpoint",
    "Environment",
    "Job",
    "Metadata",
    "Rendezvous",
    "Resources",
    "Restarts",
    "Spec",
    "Workers",
    "absent",
    "anchor",
    "archive",
    "code_of",
    "dump",
    "load",
    "local",
    "no_such_file",
    "of",
    "parse",
    "pinned",
    "schema",
    "text",
    "web",
    "without_secrets",
]
