#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Runs in a container of any release: its systemd reads every file of ours and must print nothing.
set -euo pipefail
source=/srv/swansong/systemd
for program in /opt/swansong/bin/swansong{,d} /usr/lib/swansong/swansong-nvme; do
	install -D -m 0755 /bin/true "$program"
done
install -m 0644 -t /etc/systemd/system "$source"/*.service
install -D -m 0644 -t /etc/systemd/system/swansongd.service.d "$source"/gpu/gpu.conf
install -D -m 0644 -t /etc/systemd/system/trainer.service.d "$source"/trainer.service.d/*.conf
printf '[Service]\nExecStart=/bin/true\n' >/etc/systemd/system/trainer.service
systemd-sysusers "$source/sysusers.d/swansong.conf" 2>&1 | grep -v '^Creating' || true
systemd-tmpfiles --create "$source/tmpfiles.d/swansong.conf"
for unit in swansongd swansongd@job swansong-restore@my-run swansong-ready@swansongd swansong-shutdown swansong-nvme trainer; do
	systemd-analyze verify --man=no "$unit.service" 2>&1
done
