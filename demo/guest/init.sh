#!/bin/sh
# The guest's init: the few mounts that programs expect, then one agent for each channel to the host.
# No service manager: from here to a shell takes a fraction of a second also under emulation.
export PATH=/usr/local/bin:/usr/lib/postgresql/15/bin:/usr/sbin:/usr/bin:/sbin:/bin
export HOME=/run LANG=C.UTF-8

mount -t proc proc /proc
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs -o mode=1777 tmpfs /tmp
mkdir -p /dev/shm /dev/pts /run/lock /run/agent
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t devpts devpts /dev/pts
ln -s /proc/self/fd /dev/fd
busybox ip link set lo up
hostname guest
dmesg -n 7  # the boot was quiet to be quick; from here on the console's log shall say why
cd /tmp || exit

for port in /dev/vport*; do
    /ashlar/agent "$port" &
done

# Init reaps what the agents' commands leave behind, and must never end.
while :; do
    wait
    sleep 1
done
