"""Data of a job that are a file on a web server: fetched once for a machine, checked, unpacked, never mixed with others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from outlast.base.errors import InvalidJob, OutlastError
from outlast.job import contract, spec
from outlast.worker.prepare import phases
from tars import tar
from web import Web


def pinned(url: str, content: bytes) -> str:
    return f"{url}#sha256={hashlib.sha256(content).hexdigest()}"


def a_job(*data: str) -> spec.Job:
    meta = {"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": {"name": "a"}}
    places = [{"from": each, "to": f"/data/{i}"} for i, each in enumerate(data)]
    return spec.parse(json.dumps({**meta, "spec": {"module": "json", "data": places}}))


Prepared = Callable[..., dict[str, str]]


@pytest.fixture
def prepared(tmp_path: Path) -> Prepared:
    """Prepares data of a worker of a run; the environment that training gets."""

    def prepared(*data: str, run: str = "first") -> dict[str, str]:
        (tmp_path / run).mkdir(exist_ok=True)
        environ = {
            contract.Env.STATE: str(tmp_path / run),
            contract.Env.CODE: str(tmp_path),
            contract.Env.CACHE: str(tmp_path / "cache"),
        }
        made = phases.Preparation(a_job(*data), environ, say=print)
        made.prepare()
        made.close()
        return environ

    return prepared


def test_an_archive_is_fetched_once_for_all_runs_of_a_machine(web: Web, prepared: Prepared) -> None:
    content = tar({"train.csv": "1,2", "val.csv": "3"})
    url = pinned(web.put("set.tar.gz", content), content)
    tree = Path(prepared(url)["OUTLAST_DATA"])
    assert {path.name for path in tree.iterdir()} == {"train.csv", "val.csv", ".outlast-data.json"}
    assert (tree / "train.csv").read_text() == "1,2"
    assert (tree / "train.csv").stat().st_mode & 0o777 == 0o444, "shared by all jobs"
    web.close()
    for run in ("first", "second"):
        assert prepared(url, run=run)["OUTLAST_DATA"] == str(tree), "the machine has it: no server is needed"


def test_what_is_not_what_the_job_file_says_is_refused(web: Web, prepared: Prepared, tmp_path: Path) -> None:
    url = f"{web.put('set.tar.gz', tar({'a.csv': '1'}))}#sha256={'0' * 64}"
    with pytest.raises(OutlastError, match=r"has the sha256 [0-9a-f]{64}, and must have 0{64}; it is not the file that is want"):
        prepared(url)
    assert [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()] == ["lock"]


def test_what_is_not_there_is_noticed_at_submission(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTLAST_CACHE", str(tmp_path / "cache"))
    url = f"{web.url}/absent.zip"
    with pytest.raises(OutlastError, match=rf"^data\[0\].from: cannot download {url}: 404 Not Found; check"):
        phases.check(a_job(f"{url}#sha256={'0' * 64}"), tmp_path / "pins")
    phases.check(a_job(pinned(web.put("there.zip", b"x"), b"x")), tmp_path / "pins")


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        (
            "https://host/set.zip",
            "must end with #sha256= and 64 hexadecimal digits, so that all workers train on the same bytes; ",
        ),
        ("https://host/set.zip#sha256=12", "must end with #sha256= and 64 hexadecimal digits"),
        (f"https://host#sha256={'0' * 64}", "must be the URL of a file: https://HOST/PATH#sha256=..."),
    ],
)
def test_a_file_on_the_web_needs_its_checksum(place: str, sentence: str) -> None:
    with pytest.raises(InvalidJob) as caught:
        a_job(place)
    assert f") {sentence}" in str(caught.value)
