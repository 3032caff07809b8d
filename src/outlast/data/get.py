"""Getting a dataset: brought to a directory, checked, unpacked, marked."""

from __future__ import annotations

import threading
from pathlib import Path

from outlast.data import place
from outlast.data.place import Marker, Say
from outlast.data.registry import Dataset
from outlast.errors import OutlastError


def get(dataset: Dataset, directory: Path, *, say: Say, stop: threading.Event) -> tuple[Marker, bool]:
    """Bring a dataset to a directory, unless it is complete there; returns its marker, and whether anything was written.

    A call that was interrupted at any point is completed by the next one. Raises OutlastError.
    """
    if found := _there(dataset, directory):
        return found, False
    with place.opened(directory, dataset.name, say=say, stop=stop) as there:
        if found := _there(dataset, directory):  # another process was faster
            return found, False
        made = dataset.made
        assert made is not None
        made.write(there.tree())
        return there.finish(Marker(dataset.name, made.source())), True


def _there(dataset: Dataset, directory: Path) -> Marker | None:
    """The marker of a directory in which the dataset is complete. Raises OutlastError when there is another dataset."""
    found = place.marker(directory)
    if found and found.name != dataset.name:
        raise OutlastError(f"{directory} holds {found.name}; choose another directory for {dataset.name}")
    return found
