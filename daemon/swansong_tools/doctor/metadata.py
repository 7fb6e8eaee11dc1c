# SPDX-License-Identifier: Apache-2.0
"""Checks of the metadata service: every path that the sources of this cloud poll."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from swansongd.config.config import Config
from swansongd.sources import aws, aws_events, gcp
from swansongd.sources.metadata import (
    DEFAULT_URL,
    TIMEOUT_MAX_S,
    TIMEOUT_S,
    MetadataClient,
    MetadataResponse,
    MetadataUnavailable,
    fallback_url,
    retry_timeouts,
    shortened,
)

from swansong_tools.doctor.clock import judge_skew, skew_s
from swansong_tools.doctor.findings import Check, Judgement, failure, of_error, ok, skipped, warning

FAMILY = "metadata"

_IDENTITY = "/latest/meta-data/instance-id"
_GCP = "/computeMetadata/v1/instance/"
# As long as the sources wait: the timeout of a request doubles from TIMEOUT_S, then the hop limit is checked.
_LIMIT_S = 4 * TIMEOUT_MAX_S
_FIX_AWS = "aws ec2 modify-instance-metadata-options --instance-id ID --http-endpoint enabled"
_FIX_GCP = "gcloud compute instances describe VM"


def checks(config: Config, cloud: str) -> Iterator[Check]:
    """One check for each path of ``aws`` or ``gcp``; other clouds have no metadata service."""
    url = config.sources.metadata_url or DEFAULT_URL
    match cloud:
        case "aws":
            yield from _aws(url)
        case "gcp":
            yield from _gcp(url)
        case _:
            nothing = skipped("no cloud is configured or detected")
            yield Check(family=FAMILY, name="metadata service", judge=lambda: nothing)


def _aws(url: str) -> Iterator[Check]:
    session = aws.ImdsSession()

    def request(path: str) -> MetadataResponse:
        with _client(url, "aws") as client:
            imds = aws.Imds(client, monotonic=time.monotonic, session=session)
            return retry_timeouts(lambda: imds.get(path))

    def path(name: str, path: str, judge: Callable[[int, str], Judgement]) -> Check:
        return _path(name, lambda: request(path), judge, needs="IMDS token", fix=_FIX_AWS)

    yield _path(
        "IMDS token", lambda: request(_IDENTITY), judge_instance, needs="network", fix=_FIX_AWS
    )
    yield path("instance-life-cycle", aws_events.LIFE_CYCLE_PATH, judge_life_cycle)
    yield path("spot notice", aws.SPOT_PATH, judge_spot)
    yield path("rebalance", aws_events.REBALANCE_PATH, judge_optional)
    yield path("Auto Scaling", aws_events.ASG_PATH, judge_optional)
    yield path("scheduled events", aws_events.SCHEDULED_PATH, judge_optional)
    yield path("event history", aws_events.HISTORY_PATH, judge_optional)
    yield _clock(lambda: request(_IDENTITY), "IMDS token")


def _gcp(url: str) -> Iterator[Check]:
    def request(key: str) -> MetadataResponse:
        with _client(url, "gcp") as client:
            return retry_timeouts(lambda: gcp.get(client, _GCP + key))

    def key(name: str, key: str, judge: Callable[[int, str], Judgement]) -> Check:
        return _path(name, lambda: request(key), judge, needs="metadata server", fix=_FIX_GCP)

    yield _path(
        "metadata server", lambda: request("id"), judge_instance, needs="network", fix=_FIX_GCP
    )
    yield key("preemptible", "scheduling/preemptible", judge_preemptible)
    yield key("preempted", "preempted", judge_preempted)
    yield key("maintenance-event", "maintenance-event", judge_optional)
    yield key("upcoming-maintenance", "upcoming-maintenance", judge_optional)
    yield key("stop-state", "shutdown-details/stop-state", judge_optional)
    yield _clock(lambda: request("id"), "metadata server")


def _client(url: str, cloud: str) -> MetadataClient:
    return MetadataClient(
        url,
        timeout_s=TIMEOUT_S,
        timeout_max_s=TIMEOUT_MAX_S,
        fallback_url=fallback_url(url, cloud),
    )


def _path(
    name: str,
    request: Callable[[], MetadataResponse],
    judge: Callable[[int, str], Judgement],
    *,
    fix: str,
    needs: str = "",
) -> Check:
    def judge_answer() -> Judgement:
        try:
            answer = request()
        except MetadataUnavailable as error:
            return of_error(error, fix)
        if answer.status not in (200, 404):
            return failure(f"request failed: HTTP {answer.status}", fix)
        return judge(answer.status, shortened(answer.body.decode("utf-8", "replace"), 100))

    return Check(
        family=FAMILY, name=name, judge=judge_answer, needs=needs, fix=fix, limit_s=_LIMIT_S
    )


def _clock(request: Callable[[], MetadataResponse], needs: str) -> Check:
    def judge_answer() -> Judgement:
        asked_wall_s = time.time()
        try:
            date = request().headers.get("date", "")
        except MetadataUnavailable as error:
            return skipped(str(error))
        return judge_skew(skew_s(date, asked_wall_s, time.time()), "the metadata service")

    return Check(
        family=FAMILY, name="clock (metadata)", judge=judge_answer, needs=needs, limit_s=_LIMIT_S
    )


# ------------------------------------------------------------ judgements


def judge_instance(status: int, text: str) -> Judgement:
    if status != 200:
        return failure(f"instance identity request failed: HTTP {status}", _FIX_AWS)
    return ok(f"instance identity: {text}")


def judge_life_cycle(status: int, text: str) -> Judgement:
    if status != 200:
        return ok("404: this VM does not have the key")
    if text != "spot":
        return ok(f"{text}: this VM will get no spot notice")
    return ok("spot")


def judge_spot(status: int, text: str) -> Judgement:
    if status == 404:
        return ok("404: no notice")
    return warning(f"a notice is in force: {text}", "swansong status")


def judge_preemptible(status: int, text: str) -> Judgement:
    if status == 200 and text.upper() == "TRUE":
        return ok("TRUE: a Spot VM")
    return ok(f"{text or status}: not a Spot VM, will not be preempted")


def judge_preempted(status: int, text: str) -> Judgement:
    if status == 404:
        return warning("404: a preemption of this VM would not be detected", _FIX_GCP)
    if text.upper() == "TRUE":
        return warning("TRUE: this VM is being preempted", "swansong status")
    if text.upper() != "FALSE":
        return failure(f"the value is neither TRUE nor FALSE: {text}", _FIX_GCP)
    return ok("FALSE: no notice")


def judge_optional(status: int, text: str) -> Judgement:
    return ok("404: no event" if status == 404 else text or "empty answer")
