#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Checks files that no Python tool reads: shell scripts, systemd units, Packer templates.  Part of `make check`.
# A missing tool is a failure in CI; elsewhere a line names the check that was skipped.
set -euo pipefail
cd "$(dirname "$0")/.."

failed=0
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# check WHAT COMMAND...: success is exit 0 with empty stderr, because some tools only print their findings.
check() {
	local what=$1
	shift
	if "$@" >"$scratch/stdout" 2>"$scratch/stderr" && [ ! -s "$scratch/stderr" ]; then
		printf 'ok      %s\n' "$what"
	else
		printf 'FAILED  %s\n' "$what"
		sed -e '/^✓/d' -e 's/^/        /' "$scratch/stdout" "$scratch/stderr"
		failed=1
	fi
}

# have TOOL WHAT: whether the tool is installed; otherwise prints that WHAT is not checked.
have() {
	if command -v "$1" >/dev/null; then
		return 0
	fi
	if [ -n "${CI:-}" ]; then
		printf 'FAILED  %s: %s is not installed\n' "$2" "$1"
		failed=1
	else
		printf 'skipped %s: %s is not installed\n' "$2" "$1"
	fi
	return 1
}

# requirements/dev.in brings shellcheck.
PATH=$PATH:$PWD/.venv/bin

if have shellcheck "shell scripts"; then
	mapfile -t scripts < <(find . \( -name '.?*' -o -name build \) -prune -o -name '*.sh' -print)
	check "shell scripts" shellcheck "${scripts[@]}" packer/package/p{re,ost}{inst,rm} .ci/run .ci/limit
fi

if have systemd-analyze "units"; then
	# A separate root with the programs and units that the units refer to.
	root=$scratch/root
	mkdir -p "$root"/{bin,opt/swansong/bin,etc/systemd/system,usr/lib/systemd}
	ln -s usr/lib "$root/lib"
	programs=(bin/sh bin/rm bin/true bin/systemctl bin/udevadm bin/systemd-tmpfiles opt/swansong/bin/swansongd opt/swansong/bin/swansong)
	programs+=(usr/lib/swansong/swansong-nvme)
	for program in "${programs[@]}"; do
		install -D -m 0755 /dev/null "$root/$program"
	done
	for units in /usr/lib/systemd/system /lib/systemd/system; do
		[ -d "$root/usr/lib/systemd/system" ] || [ ! -d "$units" ] || cp -r "$units" "$root/usr/lib/systemd/"
	done
	# Copies of the links: an installation has them as files, and systemd refuses such a link.
	mkdir "$scratch/units"
	cp -L systemd/*.service systemd/*.timer "$scratch/units"
	cp -r "$scratch"/units/* systemd/trainer.service.d "$root/etc/systemd/system/"
	install -D -m 0644 -t "$root/etc/systemd/system/swansongd.service.d" systemd/gpu/gpu.conf
	printf '[Service]\nExecStart=/bin/sh\n' >"$root/etc/systemd/system/trainer.service"
	for unit in swansongd swansongd@job swansong-restore@my-run swansong-ready@swansongd@job swansong-shutdown swansong-nvme trainer \
		swansong-exporter swansong-prune swansong-prune.timer swansong-prune@job.timer; do
		[ "${unit%.timer}" != "$unit" ] || unit+=.service
		check "syntax of $unit" systemd-analyze verify --man=no --recursive-errors=no \
			--root="$root" "/etc/systemd/system/$unit"
	done
	for unit in "$scratch"/units/*.service; do
		# This unit mounts a file system for all others and ends before they start: a sandbox would prevent that.
		[ "${unit##*/}" != swansong-nvme.service ] || continue
		check "exposure of ${unit##*/} is at most 1.6" systemd-analyze security --offline=true \
			--threshold=16 --no-pager "$unit"
	done
	cp systemd/swansongd.service "$scratch/"
	install -D -m 0644 -t "$scratch/swansongd.service.d" systemd/gpu/gpu.conf
	check "exposure of swansongd.service with access to GPUs is at most 2.0" systemd-analyze security \
		--offline=true --threshold=20 --no-pager "$scratch/swansongd.service"
fi

if have packer "Packer templates"; then
	# Without plugins.pkr.hcl and IMDSv2, which Packer 1.6 does not support; it checks every other argument.
	export CHECKPOINT_DISABLE=1 PACKER_CONFIG_DIR=$scratch
	check "format of the Packer templates" packer fmt -check packer
	mkdir -p "$scratch/clone/build/wheelhouse" "$scratch/clone/daemon/swansongd"
	cp -r packer systemd constraints.txt "$scratch/clone/"
	rm "$scratch/clone/packer/plugins.pkr.hcl"
	touch "$scratch/clone/daemon/swansongd/swansong.example.toml"
	depth=() # later versions check arguments only with plugins
	packer version | grep -q '^Packer v1\.6\.' || depth=(-syntax-only)
	sed -i '/^  imds_support/d; /^  metadata_options {/,/^  }/d' "$scratch/clone/packer/aws.pkr.hcl"
	check "Packer templates" env --chdir "$scratch/clone/packer" \
		packer validate -var gcp_project=none "${depth[@]}" .
fi

exit "$failed"
