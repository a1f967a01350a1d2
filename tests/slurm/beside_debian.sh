#!/bin/bash
# tests/slurm/beside_debian.sh SUITE TREE COMMAND [ARGUMENT ...]
#
# Runs COMMAND in this folder beside the Slurm of a Debian suite, whatever this machine's own Slurm is, and says first which release
# that is: `forky` moves on.  Needs root and apt-get.
# TREE becomes a root of that suite by debootstrap the first time (about 500 MB) and is kept; remove it with rm -rf for a newer one.
# This folder and the folders that .venv's interpreter reads are bound into it at their own paths, so .venv works inside.  The mounts
# are private to this command: they are gone when it ends, however it ends.
set -eu

packages=(slurmctld slurmd slurm-client munge slurmdbd mariadb-server-core mariadb-client-core make git iproute2 procps strace
          util-linux ca-certificates libffi8 libssl3t64 libsqlite3-0 libreadline8t64 libbz2-1.0 liblzma5 zlib1g libgomp1)
sources=/etc/apt/sources.list.d/debian.sources

make_tree() {
  command -v debootstrap >/dev/null || apt-get install -y -q debootstrap
  local mirror script=/usr/share/debootstrap/scripts/$suite
  mirror=$(awk '$1 == "URIs:" { print $2; exit } $1 == "deb" { for (i = 2; i <= NF; i++) if ($i ~ /^http/) { print $i; exit } }' \
    $(ls $sources /etc/apt/sources.list 2>/dev/null))
  [ -e "$script" ] || script=/usr/share/debootstrap/scripts/sid  # a debootstrap older than the suite
  rm -rf "$tree"
  debootstrap --variant=minbase --include=ca-certificates "$suite" "$tree" "$mirror" "$script"
  cp -f /etc/apt/apt.conf.d/* "$tree/etc/apt/apt.conf.d/"
  chroot "$tree" apt-get update -q
  DEBIAN_FRONTEND=noninteractive chroot "$tree" apt-get install -y -q --no-install-recommends "${packages[@]}"
  take_older_libmariadb "$mirror"
  touch "$tree/.made"
}

# slurmdbd of trixie and of forky does not start beside their libmariadb3 11.8.9, see cluster/sandbox_accounting.py.
take_older_libmariadb() {
  local line="deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $1 bookworm main" own=/opt/libmariadb
  mkdir "$tree$own"
  echo "$line" >"$tree/etc/apt/sources.list.d/bookworm.list"
  chroot "$tree" apt-get update -q
  chroot "$tree" sh -ec "cd $own; apt-get download -q libmariadb3/bookworm; dpkg -x libmariadb3_*.deb ."
  rm "$tree/etc/apt/sources.list.d/bookworm.list"
  (cd "$tree" && ls -d .$own/usr/lib/*/) | cut -c2- >"$tree/etc/ld.so.conf.d/000-libmariadb.conf"  # read first
  chroot "$tree" ldconfig
}

if [ "${BESIDE_DEBIAN:-}" != private ]; then
  BESIDE_DEBIAN=private exec unshare --mount --propagation private "$0" "$@"
fi
suite=$1
tree=$(realpath -m "$2")
shift 2

mkdir -p "$(dirname "$tree")"
exec 9>"$tree.lock"
flock 9  # one call makes the tree, the others wait for it
if [ ! -e "$tree/.made" ]; then
  (make_tree) >"$tree.log" 2>&1 &  # not in a condition, where set -e would count for nothing
  wait $! || {
    tail -n 20 "$tree.log" >&2
    echo "no Debian $suite could be made in $tree; all that was said is in $tree.log" >&2
    exit 1
  }
fi
exec 9>&-

mount --bind "$tree" "$tree"
mount -t proc proc "$tree/proc"
.venv/bin/python -c 'import os, sys
for path in [sys.base_prefix, sys.prefix, *sys.path]:
    if os.path.isdir(path): print(os.path.realpath(path))' | sort -u | while read -r folder; do
  case "$folder/" in "$PWD"/*) continue ;; esac
  mkdir -p "$tree$folder"
  mount --rbind "$folder" "$tree$folder"
done
for folder in /dev "$PWD"; do
  mkdir -p "$tree$folder"
  mount --rbind "$folder" "$tree$folder"
done
cp -f /etc/hosts /etc/resolv.conf "$tree/etc/"
echo "beside Debian $suite: $(chroot "$tree" slurmctld -V)"
# Not chroot(1), inside of which nobody may make a user namespace: user_namespaces(7)
here=$PWD
cd "$tree"
pivot_root . mnt
umount --lazy /mnt
exec /usr/bin/env -u SLURM_CONF -u BESIDE_DEBIAN HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
  bash -c 'cd "$0" && exec "$@"' "$here" "$@"
