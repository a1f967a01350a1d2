#!/bin/bash
# tests/slurm/beside_debian13.sh TREE COMMAND [ARGUMENT ...]
#
# Runs COMMAND in this folder beside the Slurm of Debian 13 (24.11), whatever this machine's own Slurm is. Needs root and apt-get.
# TREE becomes a Debian 13 root by debootstrap the first time (about 400 MB) and is kept; remove it with rm -rf.
# This folder and the interpreter behind .venv are bound into it at their own paths, so .venv works inside. The mounts are private
# to this command: they are gone when it ends, however it ends.
set -eu

packages=(slurmctld slurmd slurm-client munge make git iproute2 procps util-linux ca-certificates
          libffi8 libssl3t64 libsqlite3-0 libreadline8t64 libbz2-1.0 liblzma5 zlib1g libgomp1)
sources=/etc/apt/sources.list.d/debian.sources

if [ "${BESIDE_DEBIAN13:-}" != private ]; then
  BESIDE_DEBIAN13=private exec unshare --mount --propagation private "$0" "$@"
fi
tree=$1
shift
python=$(.venv/bin/python -c 'import sys; print(sys.base_prefix)')

if [ ! -e "$tree/.made" ]; then
  command -v debootstrap >/dev/null || apt-get install -y -q debootstrap >/dev/null
  mirror=$(awk '$1 == "URIs:" { print $2; exit } $1 == "deb" { for (i = 2; i <= NF; i++) if ($i ~ /^http/) { print $i; exit } }' \
    $(ls $sources /etc/apt/sources.list 2>/dev/null))
  rm -rf "$tree"
  debootstrap --variant=minbase --include=ca-certificates trixie "$tree" "$mirror" >/dev/null
  cp -f /etc/apt/apt.conf.d/* "$tree/etc/apt/apt.conf.d/"
  chroot "$tree" apt-get update -q >/dev/null
  DEBIAN_FRONTEND=noninteractive chroot "$tree" apt-get install -y -q --no-install-recommends "${packages[@]}" >/dev/null
  touch "$tree/.made"
fi

shared=()
if [ -d ../shared ]; then shared=("$(realpath ../shared)"); fi
mount -t proc proc "$tree/proc"
for folder in /dev "$python" "$PWD" "${shared[@]}"; do
  mkdir -p "$tree$folder"
  mount --rbind "$folder" "$tree$folder"
done
cp -f /etc/hosts /etc/resolv.conf "$tree/etc/"
exec chroot "$tree" /usr/bin/env -u SLURM_CONF -u BESIDE_DEBIAN13 HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
  bash -c 'cd "$0" && exec "$@"' "$PWD" "$@"
