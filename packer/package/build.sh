#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Builds the Debian package, and prints its path:
#   packer/package/build.sh DIRECTORY [WHEELHOUSE]
# PYTHON and INTERPRETER are as in stage.sh.  The same commit gives the same bytes.  COMPRESSION=none saves a minute
# for a package that is installed at once.
set -euo pipefail
umask 022
here=$(realpath "$(dirname "$0")")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
root=$scratch/root
"$here/stage.sh" "$root" "${2:-}"

# A package for another minor version of Python needs another build: its name in the repository is a directory.
depends='libc6 (>= 2.28), systemd (>= 247)'
interpreter=$(readlink "$root/opt/swansong/bin/python")
case $interpreter in
/usr/bin/python3.*) depends+=", ${interpreter##*/}" ;;
esac
about=$(echo "$root"/opt/swansong/lib/python3.*/site-packages/swansongd-*.dist-info/METADATA)
version=$(sed -n 's/^Version: //p' "$about")
install -D -m 0644 "$here/lintian-overrides" "$root/usr/share/lintian/overrides/swansong"
install -D -m 0755 -t "$root/DEBIAN" "$here"/{preinst,postinst,prerm,postrm}
size_bytes=$(find "$root" -type f -printf '%s\n' | awk '{ sum += $1 } END { print sum }')
cat >"$root/DEBIAN/control" <<-CONTROL
	Package: swansong
	Version: $version
	Architecture: $(dpkg --print-architecture)
	Maintainer: Swansong <swansong@localhost>
	Installed-Size: $((size_bytes / 1024))
	Depends: $depends
	Recommends: polkitd
	Section: admin
	Priority: optional
	Description: checkpoint and preemption daemon for GPU VMs
	 Saves the checkpoints of a training run to an object store before a spot VM
	 is terminated, and restores them on the next VM.
CONTROL
(cd "$root" && find . -type f ! -path './DEBIAN/*' -printf '%P\0' | sort -z | xargs -0 md5sum >DEBIAN/md5sums)

SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$here" -c safe.directory='*' log -1 --format=%ct 2>/dev/null || echo 315532800)}
export SOURCE_DATE_EPOCH
find "$root" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
mkdir -p "$1"
deb=$(realpath "$1")/swansong_${version}_$(dpkg --print-architecture).deb
dpkg-deb --root-owner-group -Z"${COMPRESSION:-xz}" --build "$root" "$deb" >/dev/null
echo "$deb"
