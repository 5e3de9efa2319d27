#!/bin/busybox sh
# First program of the guest: loads the modules that the root disk needs, then goes over to it.
# The modules lie in /modules in load order; busybox stands in for every command.
# The root disk is told apart by its serial, because the disks under test come first (vda, vdb, …).
busybox echo 'the first program of the guest runs'
busybox mount -t devtmpfs devtmpfs /dev
busybox mount -t sysfs sysfs /sys

for module in /modules/*.ko; do
    busybox insmod "$module"
done

for disk in /sys/block/vd*; do
    if [ "$(busybox cat "$disk/serial")" = ashlar-guest ]; then
        busybox mount -t ext4 -o ro "/dev/${disk##*/}" /root
    fi
done

busybox mount --move /dev /root/dev
busybox mount --move /sys /root/sys
exec busybox switch_root /root /ashlar/init
