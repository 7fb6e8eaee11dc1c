#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Makes a bootable disk from the layers that containers boot from.  Started by image.py as
#   unshare --mount --pid --fork --kill-child make_image.sh REPOSITORY GIVEN LAYERS SCRATCH
# GIVEN has the wheels; LAYERS is a list for overlayfs; SCRATCH/out gets vmlinuz, initrd.img, disk.ext4.
set -euo pipefail
repository=$1 given=$2 layers=$3 scratch=$4

root=$scratch/root out=$scratch/out
mkdir "$scratch"/{upper,work,root,out}
mount -t overlay overlay -o "lowerdir=$layers,upperdir=$scratch/upper,workdir=$scratch/work" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mkdir -p "$root"/srv/{swansong,given}
mount --bind -o ro "$repository" "$root/srv/swansong"
mount --bind -o ro "$given" "$root/srv/given"
chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root PYTHONDONTWRITEBYTECODE=1 \
	/bin/bash /srv/swansong/testkit/vm/prepare.sh
umount "$root"/srv/{swansong,given} "$root/proc"
umount --lazy "$root/dev"
rmdir "$root"/srv/{swansong,given}

cp "$root"/boot/vmlinuz-* "$out/vmlinuz"
cp "$root"/boot/initrd.img-* "$out/initrd.img"
rm "$root"/boot/*
mke2fs -q -t ext4 -d "$root" "$out/disk.ext4" 1600M
