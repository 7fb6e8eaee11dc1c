#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# testkit/install_stores.sh DIRECTORY: the servers of S3 that `make test-stores` needs and no Python package has.
# Nothing is installed on the machine itself, and root is not needed: npm and Debian's packages are unpacked there.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
	printf '%s\n' "$1" >&2
	exit 1
}

directory=$1
command -v node >/dev/null || fail 'make test-stores needs Node.js 17 or later: install the package nodejs'
command -v npm >/dev/null || fail 'make test-stores needs npm: install the package npm'
command -v apt-get >/dev/null || fail 'make test-stores takes Ceph from the packages of Debian 12: run it there'
[ "$(dpkg --print-architecture)" = amd64 ] || fail 'make test-stores needs amd64: Ceph is looked for in its directories'

mkdir -p "$directory"
cp requirements/stores/package.json requirements/stores/package-lock.json "$directory"
npm ci --prefix "$directory" --ignore-scripts --no-audit --no-fund

rm -rf "$directory/packages" "$directory/ceph"
mkdir "$directory/packages" "$directory/ceph"
# The packages that are missing on this machine.  Ceph from a version of its own is none of them.
wanted=(radosgw ceph-mon ceph-osd ceph-mgr ceph-common)
mapfile -t names < <(apt-get install --simulate --no-install-recommends "${wanted[@]}" | awk '/^Inst/ {print $2}')
printf '%s\n' "${names[@]}" | grep -qx radosgw ||
	fail 'apt knows no radosgw, or it is installed already: run apt-get update, and remove it'
(cd "$directory/packages" && apt-get download "${names[@]}")
for package in "$directory"/packages/*.deb; do
	dpkg -x "$package" "$directory/ceph"
done
rm -r "$directory/packages"
