#!/usr/bin/env bash
# An emulated cluster on one Linux machine: a network namespace a node, joined by a bridge, each link as slow as RATE.
#
#     bash benchmarks/cluster.sh overlap [options of benchmarks/cluster_overlap.py]
#     bash benchmarks/cluster.sh order [options of benchmarks/cluster_order.py]
#
# NODES (4), PER_NODE (processes of a node: 1), RATE (400mbit) and PYTHON (python) come from the environment. Needs root,
# ip and tc (iproute2); ends with 0 and a reason where one is missing.
set -euo pipefail

module=benchmarks.cluster_${1:?overlap or order}
shift
nodes=${NODES:-4} per_node=${PER_NODE:-1} rate=${RATE:-400mbit} python=${PYTHON:-python}
name=ff$$ # of the bridge, and the beginning of every other name

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
        ip link delete "$name-$node" 2>/dev/null || true # with its peer; the namespace may take longer to go
        ip netns delete "$name-$node" 2>/dev/null || true
    done
    ip link delete "$name"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

# A queue of a second drops nothing; packets of up to 64 KiB pass whole. A connection has at most 128 KiB in the queue: as in
# a network card, a small message does not wait until another connection's large one is through.
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
