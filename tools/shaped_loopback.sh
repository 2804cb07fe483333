#!/usr/bin/env bash
# Runs a command whose processes reach each other over a loopback of a given rate, in a new network namespace.
#
#   tools/shaped_loopback.sh 400mbit torchrun --standalone --nproc-per-node 2 -m sft train RECIPE
#   tools/shaped_loopback.sh none COMMAND        the same namespace, without a limit
#
# Communication between ranks on one machine then takes the time that it takes over a network of this rate, which all
# ranks share.  The rate is one of tc(8), such as 400mbit; a token bucket (tc-tbf(8)) delays what exceeds it, and drops
# nothing.  The command sees no other network.  Needs Linux, root, `unshare` of util-linux, and `ip` and `tc` of
# iproute2.
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: $0 RATE|none COMMAND [ARGUMENT ...]" >&2
    exit 2
fi
rate=$1
shift
for tool in unshare ip tc; do
    if ! command -v "$tool" >/dev/null; then
        echo "$0: $tool is not installed; it is part of util-linux (unshare) or iproute2 (ip, tc)" >&2
        exit 2
    fi
done
if ! unshare --net true; then
    echo "$0: this user may not make a network namespace, which needs root (CAP_SYS_ADMIN and CAP_NET_ADMIN)" >&2
    exit 2
fi

# In the namespace.  The bucket holds what the kernel sends at once, and the queue waits for at most a second.
# shellcheck disable=SC2016 # the arguments of the inner shell
inside='
    rate=$1; shift
    ip link set lo up
    if [ "$rate" != none ]; then
        tc qdisc add dev lo root tbf rate "$rate" burst 512kb latency 1s
    fi
    exec "$@"
'
export GLOO_SOCKET_IFNAME=lo
exec unshare --net bash -euc "$inside" "$0" "$rate" "$@"
