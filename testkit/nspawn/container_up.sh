#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Mounts layers as a root file system, in which systemd-nspawn boots (--boot) or runs a command.  Started in
# new namespaces, so that no mount or process outlives this shell, as
#   unshare --mount --pid --fork --kill-child --mount-proc container_up.sh NAME LAYERS DISK [nspawn arguments]
# LAYERS is a list for overlayfs, the topmost first.  DISK/upper takes all writes.
set -euo pipefail
name=$1 layers=$2 disk=$3
shift 3

mount --make-rprivate /
# A separate control group: otherwise two containers would share theirs.
for tree in /sys/fs/cgroup/systemd /sys/fs/cgroup/unified /sys/fs/cgroup; do
	if [ -e "$tree/cgroup.procs" ]; then
		mkdir -p "$tree/$name"
		echo 0 >"$tree/$name/cgroup.procs"
	fi
done
mount -t cgroup2 cgroup2 /sys/fs/cgroup # the guest always sees version 2
mount -t tmpfs tmpfs /run               # nspawn cleans up only there
mkdir -p /run/systemd "$disk"/{upper,work,root}
mount -t overlay overlay -o "lowerdir=$layers,upperdir=$disk/upper,workdir=$disk/work" "$disk/root"

# This end of the guest's network link: its gateway, the address of the stores, and the metadata service.
(
	for _ in $(seq 1000); do
		if ip link show "ve-$name" >/dev/null 2>&1; then
			ip address add 10.99.0.1/24 dev "ve-$name"
			ip address add 169.254.169.254/32 dev "ve-$name"
			ip link set "ve-$name" up
			break
		fi
		sleep 0.02
	done
) &

exec systemd-nspawn --quiet --machine="$name" --directory="$disk/root" --register=no --keep-unit \
	--network-veth --link-journal=no --resolv-conf=off --timezone=off "$@"
