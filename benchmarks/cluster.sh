#!/usr/bin/env bash
# Emulate a cluster on one Linux machine. Each node is a network namespace. A bridge connects the nodes, through links
# with the bandwidth RATE.
#
#     bash benchmarks/cluster.sh overlap [options of benchmarks/cluster_overlap.py]
#     bash benchmarks/cluster.sh order [options of benchmarks/cluster_order.py]
#
# Environment variables and their defaults: NODES (4), PER_NODE (processes per node, 1), RATE (400mbit), and PYTHON
# (python). Needs root, ip, and tc (iproute2). If one is missing, the script says so and exits with 0.
set -euo pipefail

module=benchmarks.cluster_${1:?overlap or order}
shift
nodes=${NODES:-4} per_node=${PER_NODE:-1} rate=${RATE:-400mbit} python=${PYTHON:-python}
name=ff$$ # Name of the bridge, and prefix of all other names.

skip() {
    echo "skipped: $1"
    exit 0
}

[ "$(uname)" = Linux ] || skip "network namespaces need Linux"
[ "$(id -u)" = 0 ] || skip "network namespaces need root"
for tool in ip tc; do
    command -v $tool >/dev/null || skip "$tool is missing (package iproute2)"
done
ip link add "$name" type bridge 2>/dev/null || skip "this system lets nobody add a bridge"

cleanup() {
    trap - EXIT
    for ((node = 0; node < nodes; node++)); do
        for process in $(ip netns pids "$name-$node" 2>/dev/null); do
            kill -9 "$process" 2>/dev/null || true
        done
        ip link delete "$name-$node" 2>/dev/null || true # This also deletes the peer. The namespace may take longer.
        ip netns delete "$name-$node" 2>/dev/null || true
    done
    ip link delete "$name"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

# The queue of a link holds one second of traffic, so that it drops no packet. Packets of up to 64 KiB pass in one
# piece. Each connection may have at most 128 KiB in the queue. So a small message does not wait for a large message of
# another connection, as with a real network card.
slow() { "$@" root tbf rate "$rate" burst 128kb latency 1s; }

ip link set "$name" up
for ((node = 0; node < nodes; node++)); do
    here=$name-$node
    ip netns add "$here"
    ip link add "$here" type veth peer name eth0 netns "$here"
    ip link set "$here" master "$name" up
    ip -n "$here" address add "10.77.0.$((node + 1))/24" dev eth0
    ip -n "$here" link set eth0 up
    ip -n "$here" link set lo up
    ip netns exec "$here" sh -c 'echo 131072 >/proc/sys/net/ipv4/tcp_limit_output_bytes'
    slow tc -n "$here" qdisc add dev eth0
    slow tc qdisc add dev "$here"
done

export GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1
for ((node = nodes - 1; node >= 0; node--)); do
    ip netns exec "$name-$node" "$python" -m torch.distributed.run --nnodes "$nodes" --node-rank "$node" \
        --nproc-per-node "$per_node" --master-addr 10.77.0.1 --master-port 29500 -m "$module" --rate "$rate" "$@" &
    processes[node]=$!
done
status=0
for process in "${processes[@]}"; do
    wait "$process" || status=1
done
exit $status
