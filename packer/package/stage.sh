#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Writes the files of an installation below TARGET:
#   packer/package/stage.sh TARGET [WHEELHOUSE]
# They are the contents of the Debian package, and of an installation without dpkg.  Without WHEELHOUSE the sources
# beside this script are built, with dependencies from the package index.
# PYTHON runs the build.  INTERPRETER, by default the same, runs the program: the same minor version, not needed here.
set -euo pipefail
umask 022
source=$(realpath "$(dirname "$0")/../..")
root=$1 wheels=${2:-}
python=${PYTHON:-python3}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# Always -I: as root, nothing may be imported from the working directory of the caller.
"$python" -I -m venv "$scratch/venv"
pip=("$scratch/venv/bin/python" -I -m pip --quiet --no-input --no-cache-dir --disable-pip-version-check)
install=("${pip[@]}" install --no-deps --no-compile)
# Third-party packages must match the hashes in constraints.txt, and are never built here: a build would fetch
# more code and run it as root.
"${install[@]}" ${wheels:+--no-index --find-links "$wheels"} \
	--require-hashes --only-binary :all: --requirement "$source/constraints.txt"
if [ -z "$wheels" ]; then
	wheels=$scratch/wheels
	"$source/packer/sources.sh" "$scratch/sources"
	SOURCE_DATE_EPOCH=315532800 "${pip[@]}" wheel --no-deps --no-index --no-build-isolation --wheel-dir "$wheels" \
		"$scratch"/sources/{training_hooks,daemon}
fi
"${install[@]}" --no-index --find-links "$wheels" --only-binary :all: swansong swansongd
"${pip[@]}" check || {
	echo "$0: constraints.txt and the wheels must be of one version" >&2
	exit 1
}

# A virtual environment is three things: its packages, pyvenv.cfg, and a link to the interpreter.
program=$root/opt/swansong
mkdir -p "$program/bin"
# Trainers install the hooks of the daemon's version from this wheel, into their own environments.
hooks=$(echo "$scratch"/venv/lib/python3.*/site-packages/swansong-*.dist-info)
install -D -m 0644 -t "$program/hooks" "$wheels/$(basename "$hooks" .dist-info)"-*.whl
"$scratch/venv/bin/python" -I "$source/packer/package/describe.py" "$root"
"${pip[@]}" uninstall --yes setuptools pip
cp -r "$scratch/venv/lib" "$program/"
find "$program/lib" -name __pycache__ -prune -exec rm -r {} + # postinst makes them where they are used
find "$program/lib" -type f -exec chmod 0644 {} +
sed -i '/^\.\.\//d' "$program"/lib/python3.*/site-packages/*.dist-info/RECORD # the commands of other packages
interpreter=${INTERPRETER:-$("$scratch/venv/bin/python" -I -c 'import os, sys; print(os.path.realpath(sys.executable))')}
ln -s "$interpreter" "$program/bin/python"
printf 'home = %s\ninclude-system-site-packages = false\n' "${interpreter%/*}" >"$program/pyvenv.cfg"

units=$source/systemd lib=$root/usr/lib share=$root/usr/share/swansong
install -D -m 0644 -t "$lib/systemd/system" "$units"/*.service "$units"/*.timer
install -D -m 0644 -t "$lib/systemd/logind.conf.d" "$units"/logind.conf.d/*
install -D -m 0644 -t "$lib/sysusers.d" "$units"/sysusers.d/*
install -D -m 0644 -t "$lib/tmpfiles.d" "$units"/tmpfiles.d/*
install -D -m 0755 "$units/nvme/swansong_nvme.py" "$lib/swansong/swansong-nvme"
install -D -m 0644 "$units/nvme/staging.conf" "$lib/swansong/nvme-staging.conf"
install -D -m 0644 -t "$share/trainer.service.d" "$units"/trainer.service.d/*
install -D -m 0644 -t "$share/swansongd.service.d" "$units"/gpu/*
mkdir -p "$root/usr/bin"
ln -s /opt/swansong/bin/swansong "$root/usr/bin/swansong"
