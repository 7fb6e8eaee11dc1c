#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Releases what is committed: packer/release.sh VERSION
# Sets the version, gives the section [Unreleased] of CHANGELOG.md its number and date, commits, and tags the commit
# with that section as the message.
set -euo pipefail
cd "$(dirname "$0")/.."
version=$1

die() {
	printf 'release: %s\n' "$*" >&2
	exit 1
}

[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || die "VERSION must look like 1.2.3, not '$version'"
[ -z "$(git status --porcelain)" ] || die "there are uncommitted changes: commit them first"
! git rev-parse --quiet --verify "refs/tags/v$version" >/dev/null || die "v$version exists"
notes=$(sed -n '/^## \[Unreleased\]$/,/^## \[[0-9]/{/^## \[/d;p}' CHANGELOG.md)
[ -n "$notes" ] || die "CHANGELOG.md has nothing below [Unreleased]"

sed -i "s/^__version__ = .*/__version__ = \"$version\"/" {daemon/swansongd,training_hooks/swansong}/__init__.py
sed -i "s/\"swansong==[^\"]*\"/\"swansong==$version\"/" daemon/pyproject.toml
sed -i "s/^## \[Unreleased\]\$/&\n\n## [$version] - $(date -u +%F)/" CHANGELOG.md
git commit --quiet --all --message "Release $version"
# Headings of the notes begin with '#', which git would remove as comments.
git tag --annotate --cleanup=verbatim --message "Swansong $version"$'\n\n'"$notes" "v$version"
echo "release: v$version is tagged; publish it with: git push --follow-tags"
