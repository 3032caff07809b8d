"""What is wrong with a job is said before anything starts: one sentence, and nothing is left of the job."""

from __future__ import annotations

import json
from typing import Any

import pytest

from faults import Proxy, denied
from machines import Machine
from outlast.base.errors import OutlastError
from outlast.storage import store
from packages import tar
from servers import Place

NO_KEYS = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_EC2_METADATA_DISABLED": "true"}
CHECKSUM = "{here}/code.tgz#sha256=" + "0" * 64

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"code": "{url}/nothing"}, r"code \(s3://.*/nothing\) does not exist; put it there, or correct the URL"),
    ({"code": "{url}/no.tgz"}, r"code \(s3://.*/no.tgz\) does not exist; put it there, or correct the URL"),
    ({"code": "{url}/code"}, r"code \(s3://.*/code/exact.py\) does not exist; put it there, or correct the URL"),
    ({"code": "{here}/code.tgz"}, r"script \(exact.py\) is not in code \(/.*/code.tgz\); correct it, or the archive"),
    ({"code": CHECKSUM}, r"has the checksum [0-9a-f]{64}, the job file says 0{64}; correct #sha256"),
    ({"code": "{here}/bad.tgz"}, r"code \(/.*/bad.tgz\) is no tar archive, or is damaged: .*; make or download it again"),
    ({"code": "{here}/code.rar"}, r"code \(/.*/code.rar\) is neither a directory nor an archive \(.tar.gz, .tgz, .tar, .zip\)"),
    ({"script": "gone.py", "code": "{here}/code"}, r"script \(gone.py\) is not in .*/code; correct it"),
    ({"data": [{"from": "nowhere", "to": "/data"}]}, r"data\[0\].from \(.*/nowhere\) does not exist; get the data, or correct"),
    ({"data": [{"from": "s3://no-such-bucket-here/x"}]}, r"data\[0\].from: .*no bucket s3://no-such-bucket-here .*; create it"),
    ({"models": [{"from": "nowhere", "name": "a"}]}, r"models\[0\].from \(/.*/nowhere\) does not exist; get the data"),
    ({"environment": {"conda": "environment.yml"}}, r"environment.conda: this machine has neither micromamba, mamba nor conda;"),
    ({"environment": {"requirements": "no.txt"}}, r"environment.requirements \(/.*/no.txt\) does not exist; correct the path"),
    ({"output": "{here}/file"}, r"output: cannot write to .*/file/job"),
    ({"output": "s3://no-such-bucket-here/runs"}, "no-such-bucket-here"),
    ({"output": "{url}", "environ": {"AWS_ACCESS_KEY_ID": "AKIDWRONG"}}, "AccessKeyId"),
    ({"output": "{url}", "environ": NO_KEYS}, "credentials"),
    ({"output": "{url}", "environ": {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "OUTLAST_STORE_TIMEOUT": "1"}}, "127.0.0.1:1"),
]


def refusal(machine: Machine, sentence: str, **fields: Any) -> None:
    """Submit a job that is refused with a sentence, and see that nothing has started."""
    with pytest.raises(OutlastError, match=sentence) as raised:
        machine.submit(machine.job(**fields))
    assert "\n" not in str(raised.value)
    assert not (machine.directory / "state" / "jobs" / "job" / "run.json").exists()


@pytest.mark.parametrize(("fields", "sentence"), WRONG)
def test_what_is_wrong_is_said_before_anything_starts(
    machine: Machine, rclone: Place, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], sentence: str
) -> None:
    here = machine.directory
    (here / "file").touch()
    (here / "bad.tgz").write_bytes(b"<html>")
    (here / "code.rar").touch()
    (here / "code").mkdir()
    (here / "code" / "see.py").touch()
    (here / "environment.yml").write_text("dependencies: [python]")
    (here / "code.tgz").write_bytes(tar({"see.py": ""}))
    store.open_(rclone.url).put("code/see.py", b"")
    whole = json.loads(json.dumps(fields).replace("{url}", rclone.url).replace("{here}", str(here)))
    for name, value in whole.pop("environ", {}).items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    refusal(machine, sentence, **whole)


def test_a_bucket_that_may_only_be_read_is_said_before_anything_starts(machine: Machine, moto_proxy: Proxy) -> None:
    moto_proxy.fault = lambda request: denied if request.method == "PUT" else None
    refusal(machine, "access is denied", output=moto_proxy.url)
