#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Runs in the container that becomes the image: provision.sh as users run it, then a typical trainer and a
# network.  /srv/swansong has the sources, /srv/given the wheels.  The package stays for tests of upgrades.
set -euo pipefail
umask 022

deb=$(COMPRESSION=none /srv/swansong/packer/package/build.sh /srv /srv/given/wheels)
mv "$deb" /srv/swansong.deb
/srv/swansong/packer/provision.sh --no-packages --deb /srv/swansong.deb

# The trainer has its own user, environment and unit, with the drop-in as its comment describes.
useradd --system trainer
python3 -m venv /opt/train
/opt/train/bin/python -m pip install --quiet --no-index --no-cache-dir --disable-pip-version-check \
	--find-links /srv/given/wheels swansong numpy
install -m 0644 -t /opt/train /srv/swansong/training_hooks/examples/{char_lm.py,sonnets.txt}
cat >/etc/systemd/system/trainer.service <<-'UNIT'
	[Unit]
	Description=The training script

	[Service]
	User=trainer
	EnvironmentFile=/etc/trainer.env
	Environment=OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
	ExecStart=/opt/train/bin/python /opt/train/char_lm.py $ARGUMENTS

	[Install]
	WantedBy=multi-user.target
UNIT
install -D -m 0644 -t /etc/systemd/system/trainer.service.d /usr/share/swansong/trainer.service.d/swansong.conf

cat >/etc/systemd/network/10-host0.network <<-'NETWORK'
	[Match]
	Name=host0

	[Network]
	Address=10.99.0.2/24
	Gateway=10.99.0.1
	DHCP=no
	LinkLocalAddressing=no
NETWORK
echo vm >/etc/hostname
mkdir -p /var/log/journal
systemctl enable --quiet trainer.service systemd-networkd.service systemd-networkd-wait-online.service
systemctl mask --quiet apt-daily.timer apt-daily-upgrade.timer e2scrub_all.timer fstrim.timer \
	systemd-timesyncd.service
