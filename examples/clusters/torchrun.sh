#!/bin/bash
# Run a fourfold command with torchrun on machines without a batch system. Start this script on every node, with the
# host name of the first node (localhost on a single machine), the number of nodes, and the number of GPUs per node:
#   bash examples/clusters/torchrun.sh node0 2 8 train examples/llama3-8b-8gpus.toml --set parallel.dp=2
# After a crash, torchrun restarts the processes up to three times, and training continues from the newest checkpoint.
set -euo pipefail
host=$1 nodes=$2 gpus=$3
shift 3
export PYTHONUNBUFFERED=1 # Print log lines immediately.
# After SIGTERM or Ctrl-C, the processes have this many seconds to finish the step and save.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300
# torch 2.13 needs this setting. Without it, a new node cannot replace a lost node.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec torchrun --nnodes="$nodes" --nproc-per-node="$gpus" --max-restarts=3 \
    --rdzv-id=fourfold --rdzv-backend=c10d --rdzv-endpoint="$host:${PORT:-29500}" \
    --no-python fourfold "$@"
