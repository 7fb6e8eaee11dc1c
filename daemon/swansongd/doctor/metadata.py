# SPDX-License-Identifier: Apache-2.0
"""Checks of the metadata service: every path that the sources of this cloud watch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from swansongd.config.config import Config
from swansongd.doctor.clock import judge_skew, skew_s
from swansongd.doctor.findings import (
    Check,
    Judgement,
    failure,
    of_error,
    ok,
    skipped,
    warning,
)
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

FAMILY = "metadata"

_IDENTITY = "/latest/meta-data/instance-id"
_GCP = "/computeMetadata/v1/instance/"
# As patient as the sources: the limit of an exchange doubles from TIMEOUT_S; then the hop limit is looked at.
_LIMIT_S = 4 * TIMEOUT_MAX_S
_FIX_AWS = "aws ec2 modify-instance-metadata-options --instance-id ID --http-endpoint enabled"
_FIX_GCP = "gcloud compute instances describe VM"

Ask = Callable[[str], MetadataResponse]


def checks(config: Config, cloud: str) -> Iterator[Check]:
    """The paths of ``aws`` or ``gcp``; none for any other cloud."""
    url = config.sources.metadata_url or DEFAULT_URL
    match cloud:
        case "aws":
            yield from _aws(url)
        case "gcp":
            yield from _gcp(url)
        case _:
            nothing = skipped("no cloud, no metadata service")
            yield Check(family=FAMILY, name="metadata service", ask=lambda: nothing)


def _aws(url: str) -> Iterator[Check]:
    session = aws.ImdsSession()

    def ask(path: str) -> MetadataResponse:
        with _client(url, "aws") as client:
            imds = aws.Imds(client, monotonic=time.monotonic, session=session)
            return retry_timeouts(lambda: imds.get(path))

    def path(name: str, path: str, judge: Callable[[int, str], Judgement]) -> Check:
        return _path(name, lambda: ask(path), judge, needs="IMDS token", fix=_FIX_AWS)

    yield _path("IMDS token", lambda: ask(_IDENTITY), judge_instance, needs="network", fix=_FIX_AWS)
    yield path("instance-life-cycle", aws_events.LIFE_CYCLE_PATH, judge_life_cycle)
    yield path("spot notice", aws.SPOT_PATH, judge_spot)
    yield path("rebalance", aws_events.REBALANCE_PATH, judge_optional)
    yield path("Auto Scaling", aws_events.ASG_PATH, judge_optional)
    yield path("scheduled events", aws_events.SCHEDULED_PATH, judge_optional)
    yield path("event history", aws_events.HISTORY_PATH, judge_optional)
    yield _clock(lambda: ask(_IDENTITY), "IMDS token")


def _gcp(url: str) -> Iterator[Check]:
    def ask(key: str) -> MetadataResponse:
        with _client(url, "gcp") as client:
            return retry_timeouts(lambda: gcp.get(client, _GCP + key))

    def key(name: str, key: str, judge: Callable[[int, str], Judgement]) -> Check:
        return _path(name, lambda: ask(key), judge, needs="metadata server", fix=_FIX_GCP)

    yield _path("metadata server", lambda: ask("id"), judge_instance, needs="network", fix=_FIX_GCP)
    yield key("preemptible", "scheduling/preemptible", judge_preemptible)
    yield key("preempted", "preempted", judge_preempted)
    yield key("maintenance-event", "maintenance-event", judge_optional)
    yield key("upcoming-maintenance", "upcoming-maintenance", judge_optional)
    yield key("stop-state", "shutdown-details/stop-state", judge_optional)
    yield _clock(lambda: ask("id"), "metadata server")


def _client(url: str, cloud: str) -> MetadataClient:
    return MetadataClient(
        url,
        timeout_s=TIMEOUT_S,
        timeout_max_s=TIMEOUT_MAX_S,
        fallback_url=fallback_url(url, cloud),
    )


def _path(
    name: str,
    ask: Callable[[], MetadataResponse],
    judge: Callable[[int, str], Judgement],
    *,
    fix: str,
    needs: str = "",
) -> Check:
    def look() -> Judgement:
        try:
            answer = ask()
        except MetadataUnavailable as error:
            return of_error(error, fix)
        if answer.status not in (200, 404):
            return failure(f"HTTP {answer.status} is no answer to rely on", fix)
        return judge(answer.status, shortened(answer.body.decode("utf-8", "replace"), 100))

    return Check(family=FAMILY, name=name, ask=look, needs=needs, fix=fix, limit_s=_LIMIT_S)


def _clock(ask: Callable[[], MetadataResponse], needs: str) -> Check:
    def look() -> Judgement:
        asked_wall_s = time.time()
        try:
            date = ask().headers.get("date", "")
        except MetadataUnavailable as error:
            return skipped(str(error))
        return judge_skew(skew_s(date, asked_wall_s, time.time()), "the metadata service")

    return Check(family=FAMILY, name="clock (metadata)", ask=look, needs=needs, limit_s=_LIMIT_S)


# ------------------------------------------------------------ judgements


def judge_instance(status: int, text: str) -> Judgement:
    if status != 200:
        return failure(f"it answers HTTP {status} to who this VM is", _FIX_AWS)
    return ok(f"answers, with a token where one is needed: this VM is {text}")


def judge_life_cycle(status: int, text: str) -> Judgement:
    if status != 200:
        return ok("this VM has no such key")
    if text != "spot":
        return ok(f"{text}: no spot notice will come")
    return ok("spot")


def judge_spot(status: int, text: str) -> Judgement:
    if status == 404:
        return ok("404: no notice")
    return warning(f"a notice is live: {text}", "swansong status")


def judge_preemptible(status: int, text: str) -> Judgement:
    if status == 200 and text.upper() == "TRUE":
        return ok("TRUE: a Spot VM")
    return ok(f"{text or status}: not a Spot VM, it will not be preempted")


def judge_preempted(status: int, text: str) -> Judgement:
    if status == 404:
        return warning("this VM has no such key: a preemption would not be seen", _FIX_GCP)
    if text.upper() == "TRUE":
        return warning("TRUE: this VM is being preempted", "swansong status")
    if text.upper() != "FALSE":
        return failure(f"neither TRUE nor FALSE: {text}", _FIX_GCP)
    return ok("FALSE: no notice")


def judge_optional(status: int, text: str) -> Judgement:
    return ok("404: nothing ahead" if status == 404 else text or "answers")
