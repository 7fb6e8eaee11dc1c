# SPDX-License-Identifier: Apache-2.0
"""The daemon at the metadata address that every cloud uses, on a network with faults.

``sources.metadata_url`` is not set: the daemon polls http://169.254.169.254, as on a VM.
"""

from __future__ import annotations

from typing import Any

import pytest
from swansongd.sources.metadata import IPV6_URLS

from testkit.clouds import SPOT_PATH, Bucket
from testkit.emulators.process import EmulatorProcess
from testkit.netns.forward_proxy import ForwardProxy
from testkit.rig import control
from testkit.waiting import until

PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
OTHER_SERVICES = ("GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP")
NO_ROUTE = "198.51.100.7:9000"


def give_notice(cloud: Any) -> None:
    """Give the notice of this cloud."""
    if cloud.metadata[0] == "aws":
        cloud.notice(in_s=60)
    else:
        cloud.preempt()


def variables(kind: str, decoy: Any) -> dict[str, str]:
    """An environment that would divert metadata requests to the decoy."""
    if kind == "proxy":
        return dict.fromkeys(PROXIES, decoy.url)
    others = dict.fromkeys(OTHER_SERVICES, decoy.authority)
    return {**others, "AWS_EC2_METADATA_SERVICE_ENDPOINT": decoy.url}


@pytest.mark.parametrize("name", ["aws", "gcp"])
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("proxy", marks=pytest.mark.fault("S15")),
        pytest.param("other service", marks=pytest.mark.fault("S16")),
    ],
)
def test_the_environment_does_not_divert_metadata_requests(
    *, clouds: Any, decoy: Any, new_vm: Any, witness: str, name: str, kind: str
) -> None:
    """From the notice to SAFE; neither a proxy nor another metadata service receives a connection."""
    cloud = getattr(clouds, name)()
    vm = new_vm(name, is_warm=False)
    daemon = vm.start_daemon(**variables(kind, decoy))
    vm.start_trainer(script=witness).lines.wait(step=5)
    give_notice(cloud)
    daemon.lines.wait(event="verdict", verdict="SAFE")
    assert not decoy.was_called()


@pytest.mark.fault("S17")
@pytest.mark.parametrize(("name", "source"), [("aws", "aws.spot"), ("gcp", "gcp.preempted")])
def test_a_redirect_is_not_followed(
    *, clouds: Any, decoy: Any, new_vm: Any, witness: str, name: str, source: str
) -> None:
    """A redirect is an error: the source is degraded until a response, and the target gets no request."""
    cloud = getattr(clouds, name)()
    control(cloud.url, "fault", kind="redirect", value=decoy.url)
    vm = new_vm(name)
    daemon = vm.start_daemon()
    daemon.lines.wait(event="health", source=source, health="degraded")
    vm.start_trainer(script=witness).lines.wait(step=5)
    control(cloud.url, "clear")
    daemon.lines.wait(event="health", source=source, health="ok")
    give_notice(cloud)
    daemon.lines.wait(event="verdict", verdict="SAFE")
    assert not decoy.was_called()


@pytest.mark.fault("N01")
def test_a_vm_boots_without_metadata(network: Any, clouds: Any, new_vm: Any, witness: str) -> None:
    """The run starts and is replicated; the notice is seen once the service responds."""
    aws = clouds.aws()
    network.drop()
    vm = new_vm("aws")
    daemon = vm.start_daemon()
    vm.start_trainer("--every-steps", "20", script=witness)
    daemon.lines.wait(event="committed")
    daemon.lines.wait(event="health", source="aws.spot", health="degraded")
    assert vm.status()["state"] == "IDLE"
    assert not daemon.lines.all(event="health", source="aws.spot", health="ok")
    network.heal()
    daemon.lines.wait(event="health", source="aws.spot", health="ok")
    aws.notice(in_s=60)
    daemon.lines.wait(event="verdict", verdict="SAFE")


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        pytest.param("drop", "no complete response", marks=pytest.mark.fault("N02")),
        pytest.param("reset", "connection re", marks=pytest.mark.fault("N02")),
        pytest.param("stall", "no complete response", marks=pytest.mark.fault("N07")),
        pytest.param("overload", "HTTP 503", marks=pytest.mark.fault("N06")),
    ],
)
def test_faults_of_the_network_delay_nothing_else(
    *, network: Any, clouds: Any, new_vm: Any, witness: str, trouble: str, words: str
) -> None:
    """A blind source reports it while status responds and commits continue; afterwards it works again."""
    aws = clouds.aws()
    vm = new_vm("aws")
    daemon = vm.start_daemon()
    daemon.lines.wait(event="health", source="aws.spot", health="ok")
    trainer = vm.start_trainer("--every-steps", "20", script=witness)
    trainer.lines.wait(step=5)

    match trouble:
        case "drop":
            network.drop()
        case "reset":
            network.reset()
        case "stall":
            control(aws.url, "fault", kind="stall", path=SPOT_PATH)
        case "overload":
            control(aws.url, "fault", kind="status", value=503)
    health = daemon.lines.wait(event="health", source="aws.spot", health="degraded")
    assert words in health["reason"]
    before = max(line["step"] for line in trainer.lines.all() if "step" in line)
    until(
        lambda: any(line["step"] > before for line in daemon.lines.all(event="committed")),
        what="a commit of a step trained in the meantime",
    )
    aws.notice(in_s=60)  # no source can see it yet
    seen = {source["name"]: source["health"] for source in vm.status()["sources"]}
    assert seen["aws.spot"] in ("degraded", "blind")
    assert not daemon.lines.all(event="notice")

    network.heal()
    control(aws.url, "clear")
    assert daemon.lines.wait(event="notice")["source"] == "aws.spot"
    daemon.lines.wait(event="verdict", verdict="SAFE")
    states = [line["health"] for line in daemon.lines.all(event="health", source="aws.spot")]
    assert (states[0], states[-1]) == ("ok", "ok")


@pytest.mark.parametrize("name", ["aws", "gcp"])
def test_a_vm_without_ipv4_is_watched(
    *, network: Any, clouds: Any, new_vm: Any, witness: str, name: str
) -> None:
    """No route leads to the IPv4 address: the daemon polls the IPv6 address and sees the notice there."""
    cloud = getattr(clouds, name)()
    with network.ipv6_only(IPV6_URLS[name].removeprefix("http://").strip("[]")):
        vm = new_vm(name)
        daemon = vm.start_daemon()
        vm.start_trainer(script=witness).lines.wait(step=5)
        give_notice(cloud)
        daemon.lines.wait(event="verdict", verdict="SAFE")


@pytest.mark.fault("N04")
def test_a_lost_token_request_is_distinguished_from_an_unreachable_service(
    network: Any, clouds: Any, new_vm: Any, witness: str
) -> None:
    """The reason contains the fix, and no notice is requested without a token."""
    aws = clouds.aws()
    network.lose_puts()
    vm = new_vm("aws")
    daemon = vm.start_daemon()
    until(
        lambda: any(
            "hop limit" in line["reason"]
            for line in daemon.lines.all(event="health", source="aws.spot", health="degraded")
        ),
        what="the hint",
    )
    assert network.dropped_packets() > 0
    assert f"GET {SPOT_PATH}" not in control(aws.url, "requests")
    vm.start_trainer(script=witness).lines.wait(step=5)
    network.heal()
    aws.notice(in_s=60)
    daemon.lines.wait(event="verdict", verdict="SAFE")


@pytest.mark.parametrize("name", ["aws", "gcp"])
def test_three_packets_of_ten_may_get_lost(
    network: Any, clouds: Any, new_vm: Any, witness: str, name: str
) -> None:
    """Lost packets are retransmitted or the request is repeated: the notice is seen."""
    cloud = getattr(clouds, name)()
    vm = new_vm(name)
    daemon = vm.start_daemon()
    vm.start_trainer(script=witness).lines.wait(step=5)
    network.lose(percent=30)
    give_notice(cloud)
    daemon.lines.wait(event="verdict", verdict="SAFE")
    until(network.dropped_packets, what="a dropped packet")


@pytest.mark.fault("N16")
def test_a_hanging_get_that_broke_off_is_repeated(clouds: Any, new_vm: Any, witness: str) -> None:
    """The metadata server restarts, which closes every request that it held."""
    clouds.gcp()
    vm = new_vm("gcp")
    daemon = vm.start_daemon()
    daemon.lines.wait(event="health", source="gcp.preempted", health="ok")
    vm.start_trainer(script=witness).lines.wait(step=5)
    clouds.kill()
    daemon.lines.wait(event="health", source="gcp.preempted", health="degraded")
    clouds.gcp().preempt()
    assert daemon.lines.wait(event="notice")["source"] == "gcp.preempted"
    daemon.lines.wait(event="verdict", verdict="SAFE")


@pytest.mark.fault("N16")
def test_the_response_to_a_hanging_get_may_be_lost_at_first(
    network: Any, clouds: Any, new_vm: Any, witness: str
) -> None:
    """The notice is given while all packets are dropped, and is seen afterwards."""
    gcp = clouds.gcp()
    vm = new_vm("gcp")
    daemon = vm.start_daemon()
    daemon.lines.wait(event="health", source="gcp.preempted", health="ok")
    vm.start_trainer(script=witness).lines.wait(step=5)
    network.drop()
    gcp.preempt()
    until(lambda: network.dropped_packets() >= 2, what="the response, and a retransmission")
    assert not daemon.lines.all(event="notice")
    network.heal()
    daemon.lines.wait(event="notice", source="gcp.preempted")
    daemon.lines.wait(event="verdict", verdict="SAFE")


@pytest.mark.fault("O22")
def test_a_proxy_for_the_store_is_not_used_for_metadata(
    clouds: Any, new_vm: Any, witness: str
) -> None:
    """Only the proxy can reach the store; notice and credentials come without the proxy."""
    aws = clouds.aws()
    with (
        EmulatorProcess("testkit.emulators.s3_server", "--port", "0", "--bucket", "ckpt") as s3,
        ForwardProxy(NO_ROUTE, s3.url).serving() as proxy,
    ):
        vm = new_vm("aws", Bucket(f"http://{NO_ROUTE}", "team").store, is_warm=False)
        daemon = vm.start_daemon(
            **dict.fromkeys(PROXIES, proxy.url),
            NO_PROXY="169.254.169.254",
            AWS_ACCESS_KEY_ID="",
            AWS_SECRET_ACCESS_KEY="",
            AWS_EC2_METADATA_DISABLED="false",
            AWS_SHARED_CREDENTIALS_FILE="/nonexistent",
            AWS_CONFIG_FILE="/nonexistent",
        )
        vm.start_trainer(script=witness).lines.wait(step=5)
        aws.notice(in_s=60)
        saved = daemon.lines.wait(event="verdict", verdict="SAFE")["step"]
        (manifest,) = Bucket(s3.url, "team").manifests()
        assert manifest["step"] == saved
        assert all(target.startswith(f"http://{NO_ROUTE}/ckpt") for target in proxy.asked)
        assert any("security-credentials" in asked for asked in control(aws.url, "requests"))
