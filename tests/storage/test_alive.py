"""Who trains a run is heard of, and nobody from elsewhere takes it while it lives."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from outlast.base.errors import AlreadyRunning, Denied, Superseded, Unreachable
from outlast.local import state_dir, store_takeover
from outlast.storage import runs, store
from outlast.storage.runs import heartbeat
from outlast.worker.agent import join_run

A, B = "team-a/cifar10", "team-b/cifar10"


def taken(place: store.Store, word: str, home: str) -> object:
    return join_run.take(place, join_run.record("cifar10", word), home=home)


@pytest.fixture
def place(memory: store.Store) -> store.Store:
    """A place whose run A has taken."""
    assert taken(memory, "a", A) == "a"
    return memory


def a_heart(place: store.Store, run: str, home: str, *, index: int = 0, owner: str = "a") -> heartbeat.Heartbeats:
    """A heart that beats only when it is told to."""
    heart = heartbeat.Heartbeats.__new__(heartbeat.Heartbeats)
    heart._run, heart._owner, heart._where, heart._index, heart._etag = run, owner, home, index, ""
    heart._doubted = False
    return heart


def test_a_run_that_lives_elsewhere_is_not_taken_and_we_are_told_whose_it_is(place: store.Store) -> None:
    heart = a_heart(place, "a", A)
    heart.once(place, first=True)
    said: list[str] = []
    with pytest.raises(AlreadyRunning) as refused:
        heartbeat.wait(place, "a", B, advice="go", say=said.append, pause=lambda _: heart.once(place, first=False))
    assert str(refused.value).startswith(f"run a in {place.url} is trained by {A} (last heartbeat ")
    assert said[0].startswith(f"{A} trained run a until ")
    assert runs.read(place).owner == "a"


def test_pods_of_another_namespace_wait_and_then_end_with_the_sentence(
    place: store.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeat.beat(place, "a", A)
    monkeypatch.setattr(heartbeat, "_POLL_S", 0.001)
    said = []

    def say(text: str) -> None:
        said.append(text)
        heartbeat.beat(place, "a", A)

    with pytest.raises(AlreadyRunning, match=r"end it there, or give this job another name.*--take-over.*--fresh"):
        join_run.take(place, join_run.record("cifar10", "b"), home=B, say=say)
    assert len(said) == 1


def test_an_owner_whose_workers_save_before_they_leave_is_waited_for(place: store.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    hearts, pauses = [a_heart(place, "a", A, index=index) for index in range(2)], 0
    hearts[0].once(place, first=True)

    def pause(_: float) -> None:
        nonlocal pauses
        pauses += 1
        for heart in hearts:
            heart.leaving = True
            if pauses < 4:
                heart.once(place, first=False)
        if pauses == 6:
            monkeypatch.setattr(heartbeat, "LEFT_S", -1.0)  # long after the last heartbeat

    heartbeat.wait(place, "a", B, advice="", say=lambda _: None, pause=pause)
    assert pauses == 6


@pytest.mark.parametrize("home", [A, B])
def test_a_dead_owner_is_waited_for_no_longer_than_needed(place: store.Store, home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat.beat(place, "a", A)
    pauses: list[float] = []
    monkeypatch.setattr(heartbeat, "DEAD_S", 0.1 if home == B else 1e9)
    heartbeat.wait(place, "a", home, advice="", say=lambda _: None, pause=lambda _: pauses.append(0))
    assert bool(pauses) == (home == B)  # the replaced pods of the same job wait for nothing
    assert taken(place, "b", home) == "a"


def test_who_has_left_is_not_waited_for(place: store.Store) -> None:
    heartbeat.beat(place, "a", A, left=True)
    assert heartbeat.held(place, "a", B) is None
    assert taken(place, "b", B) == "a"


def test_who_says_that_it_leaves_is_not_waited_for_after_the_others_could_have_spoken(
    place: store.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`outlast cancel`, a change, `outlast submit`: another ElasticJob, which knows nothing of the one before."""
    heart, other = a_heart(place, "a", A), a_heart(place, "a", A, index=1)
    for each in (heart, other):
        each._stop, each._thread, each._open, each.silent = threading.Event(), threading.Thread(), lambda: place, False
        each._thread.start()
        each.once(place, first=True)
    other.leave()  # it was not the one who spoke
    assert not heartbeat.last(place).leaving
    heart.leave()
    assert heartbeat.held(place, "a", B) is not None  # another may still train there, and says so
    monkeypatch.setattr(heartbeat, "LEFT_S", 0.0)
    assert heartbeat.held(place, "a", B) is None
    other.once(place, first=False)
    assert heartbeat.held(place, "a", B) is not None


def test_a_run_that_was_released_is_left_by_its_owner_and_free(place: store.Store) -> None:
    heart = a_heart(place, "a", A)
    heart.once(place, first=True)
    assert heartbeat.release(place) == A
    with pytest.raises(Superseded):
        heart.once(place, first=False)
    assert taken(place, "b", B) == "a"


def test_only_worker_0_speaks_while_it_does(place: store.Store) -> None:
    first, second = a_heart(place, "a", A), a_heart(place, "a", A, index=1)
    first.once(place, first=True)
    for _ in range(3):
        before = heartbeat.last(place).etag
        second.once(place, first=False)
        assert heartbeat.last(place).etag == before
        first.once(place, first=False)
    second.once(place, first=False)
    before = heartbeat.last(place).etag
    second.once(place, first=False)  # nobody has spoken since it looked last
    assert heartbeat.last(place).etag != before


def test_who_may_not_delete_asks_all_the_same(place: store.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat.beat(place, "a", A)

    def refuse(*_: object) -> None:
        raise Denied("you may not delete here")

    monkeypatch.setattr(store.Store, "delete", refuse)
    assert (held := heartbeat.held(place, "a", B)) is not None
    assert held[0].where == A


def test_a_heart_goes_on_whatever_fails(place: store.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.001)
    faults = iter([RuntimeError("nobody foresaw this"), Unreachable("the store is away")])
    spoken = threading.Event()

    def once(self: heartbeat.Heartbeats, place: store.Store, *, first: bool) -> None:
        if fault := next(faults, None):
            raise fault
        spoken.set()

    monkeypatch.setattr(heartbeat.Heartbeats, "once", once)
    heart = heartbeat.Heartbeats(lambda: place, "a", "a", A)
    assert spoken.wait(60)
    heart.stop()


def test_two_clusters_with_the_same_file_notice_each_other(place: store.Store) -> None:
    here, there = a_heart(place, "a", f"{A} of cluster 1"), a_heart(place, "a", f"{A} of cluster 2")
    for first in (True, False):
        for heart in (here, there):
            heart.once(place, first=first)
    with pytest.raises(Superseded, match=r"is trained by team-a/cifar10 of cluster 2 now"):
        here.once(place, first=False)
    for _ in range(3):
        there.once(place, first=False)


@pytest.mark.parametrize("index", [0, 1])
def test_the_last_word_of_an_owner_that_stood_still_ends_nobody(place: store.Store, index: int) -> None:
    runs.acquire(place, "a", "b")  # A was silent for long
    ours = a_heart(place, "a", B, owner="b")
    hearts = [ours, a_heart(place, "a", B, index=1, owner="b")]
    for _ in range(2):
        for heart in hearts:
            heart.once(place, first=False)
    heartbeat.beat(place, "a", A)  # which it had begun before
    hearts[index].once(place, first=False)
    for _ in range(3):
        for heart in hearts:
            heart.once(place, first=False)
    assert heartbeat.last(place).where == B


def test_pods_know_their_cluster_by_its_authorities_and_those_of_an_operator_are_one_owner_when_these_change(
    memory: store.Store, tmp_path: Path
) -> None:
    environ = {"OUTLAST_NAMESPACE": "team-a", "OUTLAST_JOB": "cifar10"}
    assert join_run.home(environ, tmp_path / "ca.crt") == A
    homes = []
    for authorities in ("before", "after"):
        (tmp_path / "ca.crt").write_text(authorities)
        homes.append(join_run.home({**environ, "OUTLAST_RUN": "a", "OUTLAST_MEMBER": "uid"}, tmp_path / "ca.crt"))
    assert join_run.home(environ, tmp_path / "ca.crt").startswith(f"{A} of cluster ")
    taken(memory, "a", homes[0])
    hearts = a_heart(memory, "a", homes[0]), a_heart(memory, "a", homes[1], index=1)
    for first in (True, False):
        for heart in hearts:
            heart.once(memory, first=first)
    assert taken(memory, "a", homes[1]) == "a"


def test_this_machine_goes_on_with_what_it_owns_at_once_and_asks_for_anything_else(memory: store.Store) -> None:
    runs.claim(memory, runs.Run("r", "job", 1.0, state="Running", owner="us"))
    heartbeat.beat(memory, "r", "host:/elsewhere")
    ours = state_dir.Run("r", 1.0, "job.yaml", "out", "code", memory.url, 1, "us")

    def refuse(text: str) -> None:
        heartbeat.beat(memory, "r", "host:/elsewhere")

    assert store_takeover.unfinished(memory, ours, ended=None, home="host:/here") is not None
    runs.acquire(memory, "r", "them")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(heartbeat, "_POLL_S", 0.001)
        with pytest.raises(AlreadyRunning, match="--take-over takes the run from it"):
            store_takeover.unfinished(memory, ours, ended=None, home="host:/here", say=refuse)
    assert store_takeover.unfinished(memory, ours, ended=None, home="host:/here", take_over=True) is not None


def test_machines_that_are_called_the_same_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_takeover.socket, "gethostname", lambda: "ubuntu")
    here, there = (store_takeover.home(tmp_path / machine / "jobs/digits") for machine in ("here", "there"))
    assert here.partition(" (id ")[2] != there.partition(" (id ")[2]
    assert store_takeover.home(tmp_path / "here/jobs/digits") == here


def test_a_run_that_was_begun_anew_while_we_waited_is_not_replaced_by_the_old_one(memory: store.Store, tmp_path: Path) -> None:
    runs.claim(memory, runs.Run("old", "job", 1.0, state="Running", owner="dead"))
    assert store_takeover.unfinished(memory, None, ended=None, home="host:/here") is not None
    runs.claim(memory, runs.Run("new", "job", 2.0, state="Running", owner="them"), replace=True)
    runs.archive(memory, "new")
    with pytest.raises(AlreadyRunning, match=r"run new of job job in .* has not ended"):
        store_takeover.take_over(memory, tmp_path, runs.Run("old", "job", 1.0, owner="us"), last=None)
    assert runs.read(memory).run == "new"
