#!/bin/sh
# Runs commands for the host, one at a time, over one virtio-serial port.
#
# The host writes a line "NONCE BASE64-OF-SCRIPT". Everything the script prints goes back as it
# comes, then the line "\x1eNONCE STATUS". The nonce is random, so no output can pass for the end.
# Each script runs in a session of its own, whose number is in /run/agent/NONCE: so that another
# port can kill it with all its children.
exec 3<>"$1" <&3  # a port can be opened only once
echo ready >&3
while read -r nonce script; do
    echo "$script" | base64 -d >"/run/agent/$nonce.sh"
    setsid --wait sh -c 'echo $$ >"/run/agent/$0"; exec sh "/run/agent/$0.sh"' "$nonce" \
        </dev/null >&3 2>&3
    status=$?
    rm -f "/run/agent/$nonce" "/run/agent/$nonce.sh"
    printf '\036%s %s\n' "$nonce" "$status" >&3
done
