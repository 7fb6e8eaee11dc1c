#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# testkit/install_stores.sh DIRECTORY: installs the servers of `make test-stores` that are not on PyPI.
# It changes nothing outside of DIRECTORY and needs no root: it unpacks packages of npm and Debian there.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
	printf '%s\n' "$1" >&2
	exit 1
}

directory=$1
command -v node >/dev/null || fail 'make test-stores needs Node.js 20 or later: install the package nodejs'
command -v npm >/dev/null || fail 'make test-stores needs npm: install the package npm'
command -v apt-get >/dev/null || fail 'make test-stores needs the Ceph packages of Debian 12: run it there'
[ "$(dpkg --print-architecture)" = amd64 ] || fail 'make test-stores needs amd64, for which the paths of Ceph are fixed'

mkdir -p "$directory"
cp requirements/stores/package.json requirements/stores/package-lock.json "$directory"
npm ci --prefix "$directory" --ignore-scripts --no-audit --no-fund

rm -rf "$directory/packages" "$directory/ceph"
mkdir "$directory/packages" "$directory/ceph"
# Download the packages that this machine lacks.  A Ceph that is already installed would be missing from the list.
wanted=(radosgw ceph-mon ceph-osd ceph-mgr ceph-common)
mapfile -t names < <(apt-get install --simulate --no-install-recommends "${wanted[@]}" | awk '/^Inst/ {print $2}')
printf '%s\n' "${names[@]}" | grep -qx radosgw ||
	fail 'apt would not install radosgw: run apt-get update; if radosgw is installed, remove it'
(cd "$directory/packages" && apt-get download "${names[@]}")
for package in "$directory"/packages/*.deb; do
	dpkg -x "$package" "$directory/ceph"
done
rm -r "$directory/packages"
