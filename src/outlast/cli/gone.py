"""Commands and options that are no more, each with what to do now. An entry stays for one minor version."""

from __future__ import annotations

from collections.abc import Sequence

_OTHER_CLOUDS = "GKE and AKS taint their nodes themselves, and the operator acts on that (docs/guide/spot.md)"
_ETCD = "kubectl apply -f examples/kubernetes/etcd-server.yaml makes one; a job with an operator needs none"
GONE: dict[str, str] = {
    "install --etcd": _ETCD,
    "install --etcd-for": _ETCD,
    "install --etcd-members": _ETCD,
    "install --etcd-storage": _ETCD,
    "install --node-watch-queue": "an EventBridge rule of the account sends notices to the queue (docs/guide/spot.md)",
    "node-watch --ahead": "maintenance is acted on 15 minutes before it begins; leave the option out",
    "node-watch --cloud": f"it watches machines of AWS; {_OTHER_CLOUDS}",
    "node-watch --dry-run": "it says what it does in its log; leave the option out",
    "node-watch --log": "its log is text; leave the option out",
    "node-watch --notice-url": "name another address of the metadata service with --metadata",
    "node-watch --port": "it has no probes and needs no port; leave the option out",
    "node-watch --queue": "an EventBridge rule of the account sends notices to the queue (docs/guide/spot.md)",
}
"""A command (`"cluster create"`), or a command with an option (`"install --etcd"`), and one sentence for its users."""


def sentence(args: Sequence[str]) -> str | None:
    """What to do instead of the command that these arguments ask for, if it is gone."""
    words = [word.partition("=")[0] for word in args]
    for gone, instead in GONE.items():
        verbs = [word for word in gone.split() if not word.startswith("-")]
        options = [word for word in gone.split() if word.startswith("-")]
        if words[: len(verbs)] == verbs and all(option in words for option in options):
            return f"outlast {gone} is no more: {instead}"
    return None
