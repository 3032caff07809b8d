"""AWS: what goes wrong, in our words. The server is moto, and a proxy that refuses."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from faults import Exchange, Proxy, always
from outlast.cloud import aws
from outlast.errors import OutlastError
from servers import Place


def refusal(code: str, message: str, status: int = 400) -> Callable[[Exchange], None]:
    """An answer as services that speak JSON (EFS, EKS) refuse."""

    def fault(exchange: Exchange) -> None:
        body = json.dumps({"ErrorCode": code, "message": message}).encode()
        exchange.reply(status, [("x-amzn-ErrorType", code), ("Content-Type", "application/json")], body)

    return fault


REFUSALS = [
    (
        refusal("AccessDeniedException", "User: me is not authorized to perform: elasticfilesystem:TagResource on it", 403),
        "the credentials do not permit it (User: me is not authorized to perform: elasticfilesystem:TagResource on it); it needs "
        "elasticfilesystem:TagResource: have it granted, or let somebody run this who has it",
    ),
    (
        refusal("AccessDeniedException", "no.", 403),
        "the credentials do not permit it (no); it needs elasticfilesystem:DescribeFileSystems: have it granted, or let somebody "
        "run this who has it",
    ),
    (
        refusal("UnrecognizedClientException", "The security token included in the request is invalid.", 403),
        "AWS does not accept the credentials in eu-west-1 (The security token included in the request is invalid); run `aws "
        "configure` or `aws sso login`, or set AWS_PROFILE, and see that the account has enabled the region",
    ),
    (
        refusal("FileSystemLimitExceeded", "1000 is the most", 403),
        "a quota of the account is reached in eu-west-1 (FileSystemLimitExceeded: 1000 is the most); delete what is not needed, "
        "or have the quota raised",
    ),
    (
        refusal("ThrottlingException", "Rate exceeded", 429),
        "AWS asks to slow down (Rate exceeded); try again in a minute",
    ),
    (
        refusal("FileSystemAlreadyExists", "fs-1 has this token", 409),
        "the name is taken in eu-west-1 (fs-1 has this token); choose another, or delete what has it",
    ),
    (
        refusal("FileSystemNotFound", "no fs-1", 404),
        "it does not exist in eu-west-1 (no fs-1); correct the name or the region",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "said"), REFUSALS, ids=lambda each: each[:20] if isinstance(each, str) else "")
def test_what_amazon_refuses_is_said_with_a_remedy(
    moto_proxy: Proxy, monkeypatch: pytest.MonkeyPatch, answer: Callable[[Exchange], None], said: str
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    moto_proxy.fault = always(answer)
    with pytest.raises(OutlastError) as caught, aws.in_our_words("volume fast"):
        aws.client("efs", "eu-west-1").describe_file_systems()
    assert str(caught.value) == f"volume fast: {said}"


def test_a_region_that_does_not_exist_is_told_from_one_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    from botocore.exceptions import EndpointConnectionError

    with pytest.raises(OutlastError) as caught, aws.in_our_words("cluster c"):
        raise EndpointConnectionError(endpoint_url="https://eks.us-west-22.amazonaws.com/")
    assert str(caught.value) == (
        'cluster c: AWS cannot be reached: Could not connect to the endpoint URL: "https://eks.us-west-22.amazonaws.com/"; there '
        "is no region us-west-22, did you mean us-west-2?; correct the region or try again"
    )
    with pytest.raises(OutlastError, match=r"us-west-2\.amazonaws\.com/\"; correct the region or try again"):  # noqa: SIM117
        with aws.in_our_words("cluster c"):
            raise EndpointConnectionError(endpoint_url="https://eks.us-west-2.amazonaws.com/")


def test_without_region_or_credentials_it_is_said_where_they_come_from(moto: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (aws.region("eu-west-1"), aws.region()) == ("eu-west-1", "us-east-1")
    for variable in ("AWS_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(variable)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(OutlastError, match="no region of AWS is set; say --region us-west-2, set AWS_REGION, or run"):
        aws.region()
    monkeypatch.setenv("AWS_PROFILE", "workshop")
    with pytest.raises(OutlastError, match=r"AWS: no credentials for AWS \(The config profile \(workshop\) could not be found\)"):
        aws.region()
    monkeypatch.delenv("AWS_PROFILE")
    with pytest.raises(OutlastError) as caught, aws.in_our_words("volume fast"):
        aws.client("efs", "us-east-1").describe_file_systems()
    remedy = "run `aws configure` or `aws sso login`, or set AWS_PROFILE"
    assert str(caught.value) == f"volume fast: no credentials for AWS (Unable to locate credentials); {remedy}"


def test_an_error_of_ours_or_of_python_passes_as_it_is() -> None:
    for error in (OutlastError("ours"), KeyError("theirs")):
        with pytest.raises(type(error)) as caught, aws.in_our_words("volume fast"):
            raise error
        assert caught.value is error
