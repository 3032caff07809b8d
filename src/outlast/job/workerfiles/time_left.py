"""Divides the time that an interrupted worker has left. Pure.

The agent divides it between training and the last upload (`for_training`); training checks whether another save fits
(`too_late_to_save`). Estimates are the durations of the previous save and upload.
"""

from __future__ import annotations

from typing import TypedDict

END_S = 2.0
"""Maximum seconds for the processes to end and for the log to be uploaded."""
UPLOAD_S = 30.0
"""Seconds assumed for the last upload before any upload has been measured; equal to `contract.Pod.LAST_PUSH_S`."""
MARGIN = 1.5
"""Time reserved for the last upload, as a multiple of the previous upload's duration."""


class Share(TypedDict):
    """Arguments of `for_training`."""

    stored: bool
    upload_s: float | None


def for_training(left_s: float, *, stored: bool, upload_s: float | None = None) -> float:
    """Return how many of the `left_s` seconds until the machine is gone are for the current step and its save.

    If the output is `stored` elsewhere, the rest is for the last upload: the previous upload's duration `upload_s` plus a margin,
    but at most half of the time, because unsaved state cannot be uploaded.
    """
    rest_s = END_S
    if stored:
        rest_s = UPLOAD_S if upload_s is None else MARGIN * upload_s + END_S
    return max(0.0, left_s - min(rest_s, left_s / 2))


def divided(left_s: float, *, stored: bool, upload_s: float | None = None) -> str:
    """Describe the result of `for_training` in a sentence."""
    training_s = for_training(left_s, stored=stored, upload_s=upload_s)
    rest_s = left_s - training_s
    if not stored:
        return f"{left_s:.0f} s are left, {training_s:.0f} s of them for the training to save"
    known = "none was measured yet" if upload_s is None else f"the last one took {upload_s:.1f} s"
    return f"{left_s:.0f} s are left: {training_s:.0f} s for the training to save, {rest_s:.0f} s for the last upload ({known})"


def too_late_to_save(left_s: float, save_s: float | None, running_s: float = 0.0) -> str:
    """Return why another save does not fit into `left_s` seconds; empty if it may fit. `save_s` is the least time that a save
    needs, as estimated from the previous save; if it is None, another save is tried. A save in progress, which has to end first,
    still needs `running_s` seconds."""
    if save_s is None or running_s + save_s <= left_s:
        return ""
    first = f", after {running_s:.0f} s for the one in progress" if running_s else ""
    return f"a save takes about {save_s:.0f} s{first}, and {left_s:.0f} s are left"


def too_late_to_upload(left_s: float, upload_s: float | None) -> str:
    """Return why the last upload cannot finish within `left_s` seconds; empty if it may finish."""
    if upload_s is None or upload_s <= left_s:
        return ""
    return f"the last upload of a checkpoint took {upload_s:.0f} s, and {left_s:.0f} s are left: this one may not be complete"
