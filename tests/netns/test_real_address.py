# SPDX-License-Identifier: Apache-2.0
"""The daemon at the metadata address that every cloud uses, on a network with faults.

``sources.metadata_url`` is not set: the daemon polls http://169.254.169.254, as on a VM.
"""

from __future__ import annotations

from typing import Any

import pytest
from swansongd.sources.metadata import IPV6_URLS

from testkit.clouds import Bucket
from testkit.emulators.process import EmulatorProcess
from testkit.netns.forward_proxy import ForwardProxy
from testkit.rig import control
from testkit.waiting import until

PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
NO_ROUTE = "198.51.100.7:9000"


def give_notice(cloud: Any) -> None:
    """Give the notice of this cloud."""
    if cloud.metadata[0] == "aws":
        cloud.notice(in_s=60)
    else:
        cloud.preempt()


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


@pytest.mark.fault("N02")
@pytest.mark.parametrize(
    ("trouble", "words"), [("drop", "no complete response"), ("reset", "connection re")]
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

    getattr(network, trouble)()
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
