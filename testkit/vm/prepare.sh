#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Runs in the root that becomes the disk of a VM, after the script of the containers: adds what a VM needs to
# boot, and runs provision.sh once more, as for an image.
set -euo pipefail
umask 022

echo '/dev/vda / ext4 rw,noatime 0 1' >/etc/fstab
echo '169.254.169.254 metadata.google.internal' >>/etc/hosts # as Google's images have it
echo 'ARGUMENTS=--steps 2000 --every-steps 100' >/etc/trainer.env
cat >/etc/systemd/network/99-all.network <<-'NETWORK'
	[Match]
	Type=ether

	[Network]
	DHCP=ipv4
	IPv6AcceptRA=no
NETWORK
# After a power cut the journal on the disk is then at most one second old.
install -d /etc/systemd/journald.conf.d
printf '[Journal]\nSyncIntervalSec=1s\n' >/etc/systemd/journald.conf.d/sync.conf
# A boot by hand logs in as root on the serial console, without a password.
install -d /etc/systemd/system/serial-getty@ttyS0.service.d
cat >/etc/systemd/system/serial-getty@ttyS0.service.d/autologin.conf <<-'GETTY'
	[Service]
	ExecStart=
	ExecStart=-/sbin/agetty --autologin root --keep-baud 115200 - linux
GETTY

sed -i 's|^name = .*|name = "run"|' /etc/swansong/swansong.toml
/srv/swansong/packer/provision.sh --no-packages --wheelhouse /srv/given/wheels --image
