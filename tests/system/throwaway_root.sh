#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Runs provision.sh on this machine's own root without changing it: an overlay in a mount namespace takes
# every write.  Started by test_provision.py as
#   unshare --mount throwaway_root.sh REPOSITORY INPUT OUTPUT PYTHON
# INPUT holds wheels and configurations; OUTPUT gets what there is to look at afterwards.
set -euo pipefail
repository=$1 input=$2 output=$3 python=$4

space=$input/space root=$input/space/root
mkdir "$space"
mount -t tmpfs tmpfs "$space"
mkdir "$space"/{upper,work,root}
mount -t overlay overlay -o "lowerdir=/,upperdir=$space/upper,workdir=$space/work" "$root"
mount --rbind /dev "$root/dev"
mount --rbind /proc "$root/proc"
mount -t tmpfs tmpfs "$root/run"
mkdir "$root"/run/{repository,input,prefix}
# Read-only: the script may change nothing beside itself.
mount --bind -o ro "$repository" "$root/run/repository"
mount --bind -o ro "$input" "$root/run/input"
prefix=$(realpath "$(dirname "$python")/..")
if [ "$prefix" != /usr ]; then # perhaps in a home, where the daemon's user could not follow
	mount --bind -o ro "$prefix" "$root/run/prefix"
	python=/run/prefix/bin/${python##*/}
fi

inside() { chroot "$root" env -i "PATH=/usr/sbin:/usr/bin:/sbin:/bin" PYTHONDONTWRITEBYTECODE=1 "$@"; }

provision() {
	(umask 077 && inside "PYTHON=$python" /run/repository/packer/provision.sh --no-packages --wheelhouse /run/input/wheels "$@")
}

# Path, kind, mode, owner, link target and content of everything that was written.
changes() {
	(cd "$space/upper" && find . -mindepth 1 -printf '%P\t%y\t%m\t%U\t%G\t%l\n' | sort)
}
contents() {
	(cd "$space/upper" && find . -type f -exec sha256sum {} + | sort)
}

provision --config /run/input/first.toml
echo '# edited by the operator' >>"$root/etc/swansong/swansong.toml"
changes >"$output/changes"
contents >"$output/contents"

provision --config /run/input/second.toml
changes >"$output/changes.again"
contents >"$output/contents.again"

cp "$root/etc/swansong/swansong.toml" "$root/etc/passwd" "$root/etc/group" "$output/"

# A trainer of another user, tight umask and all; then the daemon's user.
trainers=$(inside getent group swansong-trainers | cut -d: -f3)
inside setpriv --reuid 65534 --regid 65534 --groups "$trainers" /bin/sh -ec '
	umask 077
	mkdir -p /var/lib/swansong/staging/step-1.partial/deep
	echo weights >/var/lib/swansong/staging/step-1.partial/deep/shard
	echo written'
inside setpriv --reuid swansong --regid swansong-trainers --init-groups /bin/sh -ec '
	cat /var/lib/swansong/staging/step-1.partial/deep/shard
	rm -r /var/lib/swansong/staging/step-1.partial
	/opt/swansong/bin/python -c "import swansong, swansongd; print(swansongd.__file__)"
	head -n 1 /opt/swansong/bin/swansongd /usr/local/bin/swansong'
if inside setpriv --reuid 65534 --regid 65534 --clear-groups ls /var/lib/swansong 2>&1; then
	echo 'a stranger can look into /var/lib/swansong'
fi

provision --image
stat -c 'machine-id has %s bytes' "$root/etc/machine-id"
