#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Startup script: sets run and bucket.  Replace the three words below, or let Terraform do it: see examples/gcp.
# The third one is the VM's preemption notice, 0 or 120 s.
# The script runs at each boot, after the daemon has started.  So the image should have a store on its own disk (the
# default): otherwise a run without a name is created in your bucket.
# shellcheck disable=SC2016 # the three words are replaced before a shell reads them
run='${run}' store='${store}' notice='${notice}'
set -euo pipefail

config=/etc/swansong/swansong.toml
named=$(sed -e "s|^name = .*|name = \"$run\"|" -e "s|^url = .*|url = \"$store\"|" \
	-e "s|^gcp_preemption_notice_s = .*|gcp_preemption_notice_s = $notice|" "$config")
if [ "$named" != "$(cat "$config")" ]; then
	printf '%s\n' "$named" >"$config"
	systemctl restart swansongd.service
fi

# trainer.service is yours.  Do not enable it in the image: it must not start before its run has a name.
mkdir -p /etc/systemd/system/trainer.service.d
cp /usr/share/swansong/trainer.service.d/swansong.conf /etc/systemd/system/trainer.service.d/swansong.conf
systemctl daemon-reload
systemctl start --no-block trainer.service
