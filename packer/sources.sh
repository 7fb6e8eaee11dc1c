#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Copies the sources of our two distributions to a directory, ready to be built there:
#   packer/sources.sh TARGET
# From a git clone they get the version of the commit, such as 0.1.0+20260131235959.g0123456789ab.  The number is the
# time of the commit, so that an upgrade always has the higher version.  A commit with the tag v0.1.0 has the plain
# version 0.1.0, as everything has without git.
set -euo pipefail
source=$(realpath "$(dirname "$0")/..")
target=$1

# The wheels get the same modes under any umask.
mkdir -p "$target"
tar -C "$source" --exclude=__pycache__ --mode=u=rwX,go=rX -c \
	training_hooks/{pyproject.toml,swansong} daemon/{pyproject.toml,swansong_bucket,swansongd,swansong_tools} | tar -C "$target" -x

in_clone() {
	TZ=UTC git -C "$source" -c safe.directory="$source" "$@" 2>/dev/null
}

# If another repository contains these sources, its commits do not describe their version.
if [ "$(in_clone rev-parse --show-toplevel)" = "$source" ] && in_clone rev-parse --verify HEAD >/dev/null; then
	plain=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' "$source/daemon/swansongd/__init__.py")
	[ "$(in_clone describe --exact-match --dirty --match "v$plain")" != "v$plain" ] || exit 0
	time=$(in_clone log -1 --date=format-local:%Y%m%d%H%M%S --format=%cd)
	commit=$(in_clone describe --always --dirty --abbrev=12 --exclude '*')
	sed -i "s/^__version__ = \"[^\"]*/&+$time.g${commit/-/.}/" \
		"$target"/{training_hooks/swansong,daemon/swansongd}/__init__.py
fi
