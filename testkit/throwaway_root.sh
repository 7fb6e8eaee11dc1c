#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Runs provision.sh on this machine's root without changing it: an overlay in a mount namespace takes
# every write.  Started by test_provision.py as
#   unshare --mount throwaway_root.sh REPOSITORY INPUT OUTPUT PYTHON
# INPUT holds wheels, their hashes and configurations; OUTPUT gets the files that the tests examine.
# shellcheck disable=SC2016 # single quotes hold text for the inner shell
set -euo pipefail
repository=$1 input=$2 output=$3 python=$4

space=$input/space root=$input/space/root
mkdir "$space"
mount -t tmpfs tmpfs "$space"
mkdir "$space"/{upper,work,root}
mount -t overlay overlay -o "lowerdir=/,upperdir=$space/upper,workdir=$space/work" "$root"
mount --rbind /dev "$root/dev"
mount --rbind /proc "$root/proc"
mount -t tmpfs -o mode=0755 tmpfs "$root/run"
mkdir "$root"/run/{repository,input,prefix}
rm -f "$root/var/lib/man-db/auto-update" # otherwise each installation rebuilds the index of all man pages
# Hide the secrets of this machine.
for home in "$root"/{root,home}; do
	mount -t tmpfs -o mode=0755 tmpfs "$home"
done
for file in "$root"/etc/{pip.conf,environment}; do
	[ ! -e "$file" ] || mount --bind /dev/null "$file"
done
# Read-only: the script must not change its own folder.
mount --bind -o ro "$repository" "$root/run/repository"
mount --bind -o ro "$input/constraints.txt" "$root/run/repository/constraints.txt"
mount --bind -o ro "$input" "$root/run/input"
prefix=$(realpath "$(dirname "$python")/..")
if [ "$prefix" != /usr ]; then # perhaps in a home that the daemon's user cannot enter
	mount --bind -o ro "$prefix" "$root/run/prefix"
	python=/run/prefix/bin/${python##*/}
fi

# An interpreter may look for its library at its build path, which is hidden above.
inside() {
	chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LD_LIBRARY_PATH=/run/prefix/lib \
		PYTHONDONTWRITEBYTECODE=1 "$@"
}

# The commit is one of the future: younger than the files of the build.  From the sources, the directory of wheels
# replaces the package index.
provision() {
	(umask 077 && inside "PYTHON=$python" SOURCE_DATE_EPOCH=4000000000 PIP_NO_INDEX=1 PIP_FIND_LINKS=/run/input/wheels \
		/run/repository/packer/provision.sh --no-packages "$@")
}

# Path, kind, mode, owner, link target and content of everything that was written, without the files of dpkg and its tools.
of_dpkg=(\( -path ./var/lib/dpkg -o -path ./var/log/dpkg.log -o -path ./var/cache/man -o -path ./var/lib/man-db -o -path ./usr/share/lintian \))
changes() {
	(cd "$space/upper" && find . -mindepth 1 "${of_dpkg[@]}" -prune -o -printf '%P\t%y\t%m\t%U\t%G\t%l\n' | sort)
}
contents() {
	(cd "$space/upper" && find . "${of_dpkg[@]}" -prune -o -type f -exec sha256sum {} + | sort)
}

# Append one byte to a wheel, which leaves it a valid wheel: the first one, so that pip ends soon.
cp -r "$input/wheels" "$space/altered"
echo >>"$(echo "$space"/altered/azure_core-*.whl)"
mkdir "$root/run/altered"
mount --bind -o ro "$space/altered" "$root/run/altered"
code=0
inside "PYTHON=$python" /run/repository/packer/provision.sh --no-packages --wheelhouse /run/altered \
	>"$output/altered" 2>&1 || code=$?
echo "exit code $code" >>"$output/altered"
(cd "$space/upper" && find . -mindepth 1 -iname '*swansong*') >>"$output/altered"

# What an installation from before the package left: an unchanged unit with its link, and a changed one.
old=$root/etc/systemd/system
mkdir -p "$old/multi-user.target.wants"
cp "$repository/systemd/swansongd.service" "$old/"
ln -s /etc/systemd/system/swansongd.service "$old/multi-user.target.wants/"
{ cat "$repository/systemd/swansong-exporter.service"; echo '# edited'; } >"$old/swansong-exporter.service"

provision --wheelhouse /run/input/wheels --config /run/input/first.toml --run first-run --store s3://bucket/prefix --metrics 127.0.0.1:9469 2>&1
rm "$old/swansong-exporter.service"
echo '# edited by the operator' >>"$root/etc/swansong/swansong.toml"
changes >"$output/changes"
contents >"$output/contents"

stat -c 'the files of the package are of %Y' "$root/usr/lib/systemd/system/swansongd.service"
cp "$root"/usr/share/{doc/swansong/sbom.cdx.json,man/man1/swansong.1.gz} "$output/"
cp "$root/etc/swansong/swansong.toml" "$root/etc/passwd" "$root/etc/group" "$output/"

# The daemon's user creates the directory of the run, as the unit does; then a trainer of another user writes to
# it with a tight umask; then the daemon's user reads and removes the files.
as_daemon() {
	inside setpriv --reuid swansong --regid swansong-trainers --init-groups /bin/sh -ec "$1"
}
trainers=$(inside getent group swansong-trainers | cut -d: -f3)
as_daemon 'umask 077; /opt/swansong/bin/python -I -c "
from pathlib import Path
from swansongd.staging.prepare import prepare
prepare(Path(\"/var/lib/swansong/staging\"), \"run\")"'
inside setpriv --reuid 65534 --regid 65534 --groups "$trainers" /bin/sh -ec '
	umask 077
	for shared in /var/lib/swansong /var/lib/swansong/staging /var/lib/swansong/restored /var/lib/swansong/store; do
		if mkdir "$shared/of-a-trainer" 2>&1; then echo "a trainer can write to $shared"; fi
	done
	mkdir -p /var/lib/swansong/staging/run/step-1.partial/deep
	echo weights >/var/lib/swansong/staging/run/step-1.partial/deep/shard
	echo written'
as_daemon '
	cat /var/lib/swansong/staging/run/step-1.partial/deep/shard || true
	if rm -rf /var/lib/swansong/staging/run; then echo pruned; fi
	for above in /var/lib/swansong /etc/swansong /usr/lib/swansong /run; do
		if mkdir "$above/of-the-daemon" 2>&1; then echo "the daemon can write to $above"; fi
	done
	/opt/swansong/bin/python -c "import swansong, swansongd; print(swansongd.__file__)"
	head -n 1 /opt/swansong/bin/swansongd /usr/bin/swansong'
if inside setpriv --reuid 65534 --regid 65534 --clear-groups ls /var/lib/swansong 2>&1; then
	echo 'a stranger can look into /var/lib/swansong'
fi

# The second run finds no dpkg, as on Amazon Linux, and builds the sources: the same files are installed again.
rm "$root/usr/bin/dpkg"
provision --config /run/input/second.toml --run second-run --image
changes >"$output/changes.again"
contents >"$output/contents.again"
stat -c 'machine-id has %s bytes' "$root/etc/machine-id"

# Faults that must keep a VM from becoming an image.
mkdir "$root/root/.aws"
echo 'aws_access_key_id = AKIAAAAAAAAAAAAAAAAA' >"$root/root/.aws/credentials"
echo 0123456789abcdef0123456789abcdef >"$root/etc/machine-id"
mkdir -p "$root/etc/systemd/logind.conf.d"
printf '[Login]\nInhibitDelayMaxSec=5s\n' >"$root/etc/systemd/logind.conf.d/zzz-later.conf"
sed -i 's/^\[Service\]/&\nNonsense=yes/' "$root/usr/lib/systemd/system/swansongd.service"
code=0
inside /opt/swansong/bin/swansong doctor --image >"$output/doctor.again" || code=$?
echo "$code" >"$output/doctor.code"

# Uninstall.
inside bash -ex /run/input/uninstall.sh
(cd "$space/upper" && find . -mindepth 1 "${of_dpkg[@]}" -prune -o -iname '*swansong*' -print) >"$output/left"
{ inside getent passwd swansong || inside getent group swansong-trainers; } >>"$output/left" || true
