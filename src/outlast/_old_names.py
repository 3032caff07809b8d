"""Modules by the names that they had before the house had wings, for processes that were there before an upgrade in place: their
command lines, and what they import later. Goes with 0.2, or in June 2027."""

TYPE_CHECKING = False  # nothing is imported here by a process of this version
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

MOVED = {
    **dict.fromkeys(("agent", "hangs", "launch", "prepare", "tracking"), "worker"),
    **dict.fromkeys(("runs", "snapshots", "store", "sync"), "storage"),
    **dict.fromkeys(("ledger", "report", "shipping", "spec", "status", "workerfiles", "contract", "accelerators"), "job"),
    **dict.fromkeys(("errors", "units", "files", "clock", "backoff", "crc32", "file_locks", "loglines"), "base"),
}
"""The wing of what was a package or module of its own."""


class Finder:
    """Finds them where they are; asked only for what nobody else has found."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        """A module that is the one with the new name, under the old one."""
        _, _, rest = name.partition("outlast.")
        if (wing := MOVED.get(rest.partition(".")[0])) is None:
            return None
        import importlib.util

        new = importlib.util.find_spec(f"outlast.{wing}.{rest}")
        if new is None or new.origin is None:
            return None
        return importlib.util.spec_from_file_location(name, new.origin, submodule_search_locations=new.submodule_search_locations)
