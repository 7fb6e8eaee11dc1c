#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Installs Swansong on this machine.  Images, tests and existing VMs use the same script.  A second run changes
# nothing, or upgrades.  The daemon is enabled and not started; an upgrade restarts a daemon that runs.
set -euo pipefail

readonly VENV=/opt/swansong
readonly CONFIG=/etc/swansong/swansong.toml

usage() {
	cat <<-'TEXT'
		usage: provision.sh [--wheelhouse DIR | --deb FILE] [--config FILE] [--run NAME] [--store URL]
		                    [--metrics ADDRESS] [--no-packages] [--image]
		  --wheelhouse DIR  install from the wheels in DIR, without a package index ("make wheelhouse" builds them);
		                    the default is the sources beside this script, with dependencies from the index
		  --deb FILE        install this package, which "make deb" builds
		  --config FILE     use FILE as /etc/swansong/swansong.toml, unless that exists; the default is the example
		  --run NAME, --store URL
		                    set run.name and store.url in a new configuration
		  --metrics ADDRESS serve metrics there: set metrics.listen, such as 127.0.0.1:9469, in a new configuration
		  --no-packages     install nothing with the package manager; fail if Python is missing
		  --image           prepare an image: remove the identity of this machine, run swansong doctor --image,
		                    and fail if doctor finds a failure
		PYTHON names the interpreter; the default is the first one of version 3.11 or later.
	TEXT
}

say() { printf 'provision: %s\n' "$*"; }

die() {
	printf 'provision: %s\n' "$*" >&2
	exit 1
}

# Prints the first interpreter that is new enough and can create a venv.
find_python() {
	local candidate
	for candidate in "${PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11; do
		if [ -n "$candidate" ] && "$candidate" -I -c \
			'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
			command -v "$candidate"
			return
		fi
	done
	return 1
}

# Installs packages quietly; on failure the output of the package manager is added to package_errors.
install_packages() {
	local said
	if command -v apt-get >/dev/null; then
		if [ "$lists_updated" = no ]; then
			said=$(apt-get update -qq 2>&1) || package_errors+=$'\n'"apt-get update: $said"
			lists_updated=yes
		fi
		said=$(DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" </dev/null 2>&1) ||
			{ package_errors+=$'\n'"apt-get install $*: $said" && return 1; }
		grep '^swansong: ' <<<"$said" >&2 || true # notes of our package
	elif command -v dnf >/dev/null; then
		said=$(dnf install -y -q "$@" 2>&1) || { package_errors+=$'\n'"dnf install $*: $said" && return 1; }
	else
		package_errors+=$'\n'"there is neither apt-get nor dnf to install $* with"
		return 1
	fi
}

ensure_packages() {
	if [ -z "$deb" ] && ! find_python >/dev/null; then
		# Prefer the distribution's own Python; Ubuntu 22.04 and Amazon Linux have 3.11 beside an older one.
		install_packages python3 python3-venv ca-certificates || true
		find_python >/dev/null || install_packages python3.11 python3.11-venv || install_packages python3.11 || true
		find_python >/dev/null ||
			die "Python 3.11 or later with the venv module cannot be installed; name one with PYTHON=...$package_errors"
	fi
	# Without polkit, logind gives a delay lock only to root, and the daemon works without the lock.
	if ! command -v pkaction >/dev/null; then
		install_packages polkitd || install_packages polkit ||
			die "polkit cannot be installed; with --no-packages, unannounced shutdowns do not wait for the flush$package_errors"
	fi
}

# On Debian and Ubuntu the program is a package; elsewhere the same files and scripts without dpkg.
install_program() {
	local build=$source/packer/package before=''
	scratch=$(mktemp -d)
	trap 'rm -rf "$scratch"' EXIT
	if [ -z "$deb" ]; then
		PYTHON=$(find_python) || die "Python 3.11 or later with the venv module is needed; name one with PYTHON=..."
		export PYTHON
	elif [ "$packages" = yes ]; then
		install_packages --reinstall --allow-downgrades "$deb" || die "$deb cannot be installed$package_errors"
		return
	fi
	if command -v dpkg >/dev/null; then
		[ -n "$deb" ] || deb=$(COMPRESSION=none "$build/build.sh" "$scratch" "$wheelhouse") || exit
		dpkg --install "$deb" >/dev/null
	else
		[ -z "$deb" ] || die "--deb needs dpkg; use --wheelhouse"
		[ ! -e "$VENV" ] || before=unknown
		"$build/stage.sh" "$scratch/root" "$wheelhouse"
		"$build/preinst" install
		cp -r --no-dereference "$scratch/root/." /
		"$build/postinst" configure "$before"
	fi
}

# A Python below /root, for example, works for root and not for the daemon.
check_daemon_can_run() {
	runuser -u swansong -- "$VENV/bin/python" -I -c 'import swansongd' ||
		die "user swansong cannot run $(realpath "$VENV/bin/python"): remove $VENV, name another with PYTHON=..."
}

# The package has written the example, unless there was a configuration.
configure() {
	if [ "$is_configured" = yes ]; then
		say "kept $CONFIG"
		return
	fi
	[ -z "$config" ] || install -m 0644 "$config" "$CONFIG"
	# Only these keys begin a line with these words.
	[ -z "$run" ] || sed -i "s|^name = .*|name = \"$run\"|" "$CONFIG"
	[ -z "$store" ] || sed -i "s|^url = .*|url = \"$store\"|" "$CONFIG"
	if [ -n "$metrics" ]; then
		sed -i "s|^#* *listen = .*|listen = \"$metrics\"|" "$CONFIG"
		grep -qxF "listen = \"$metrics\"" "$CONFIG" || die "--metrics needs a line 'listen = ' below [metrics] in $config"
	fi
	say "wrote $CONFIG"
}

next_steps() {
	if [ -d /run/systemd/system ] && systemctl --quiet is-active swansongd.service; then
		echo "swansong doctor"
	else
		echo "edit $CONFIG, then systemctl start swansongd, then swansong doctor"
	fi
}

# Removes the identity of this machine; the first boot of the image creates a new one.
forget_this_machine() {
	if command -v cloud-init >/dev/null; then
		cloud-init clean --logs
	fi
	: >/etc/machine-id
	# The first boot would read the old identity, and a random seed that all VMs share, from these files.
	rm -f /var/lib/dbus/machine-id /var/lib/systemd/random-seed /var/lib/systemd/credential.secret
	rm -f /var/lib/swansong/nvme.uuid # the disk that swansong-nvme formatted
}

lists_updated=no package_errors=''
wheelhouse='' deb='' config='' run='' store='' metrics='' packages=yes image=no
while [ $# -gt 0 ]; do
	case $1 in
	--wheelhouse | --deb | --config)
		[ -e "${2:-}" ] || die "$1 needs something that exists, not '${2:-}'"
		printf -v "${1#--}" %s "$(realpath "$2")"
		shift
		;;
	--run | --store)
		[[ $# -gt 1 && $2 =~ ^[A-Za-z0-9._:/-]*$ ]] || die "$1 needs a name or a URL, not '${2:-}'"
		printf -v "${1#--}" %s "$2"
		shift
		;;
	--metrics)
		[[ $# -gt 1 && $2 =~ ^[][A-Za-z0-9._:/-]*$ ]] || die "$1 needs an address, not '${2:-}'"
		metrics=$2
		shift
		;;
	--no-packages) packages=no ;;
	--image) image=yes ;;
	-h | --help)
		usage
		exit 0
		;;
	*)
		usage >&2
		exit 2
		;;
	esac
	shift
done
[ "$(id -u)" = 0 ] || die "must be root: it creates a user, units and $VENV"
umask 022
source=$(realpath "$(dirname "$0")/..")
is_configured=no
[ ! -e "$CONFIG" ] || is_configured=yes
[ "$packages" = no ] || ensure_packages
install_program
check_daemon_can_run
configure
if [ "$image" = yes ]; then
	forget_this_machine
	"$VENV/bin/swansong" --config "$CONFIG" doctor --image || die "this machine must not become an image"
else
	say "done: $(next_steps)"
fi
