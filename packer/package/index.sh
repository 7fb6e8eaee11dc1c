#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Writes apt's indexes of a tree of packages, one flat repository in each directory:
#   packer/package/index.sh TREE
set -euo pipefail
cd "$1"
for directory in */; do
	dpkg-scanpackages --multiversion "${directory%/}" >"$directory/Packages"
	gzip --keep --force --no-name "$directory/Packages"
	(
		cd "$directory"
		printf 'Origin: Swansong\nSuite: %s\nDate: %s\nSHA256:\n' "${directory%/}" "$(LC_ALL=C date -u '+%a, %d %b %Y %T UTC')"
		for index in Packages Packages.gz; do
			printf ' %s %s %s\n' "$(sha256sum <$index | cut -d ' ' -f 1)" "$(stat -c %s $index)" $index
		done
	) >"$directory/Release"
done
