#!/bin/bash
# Written by `fourfold launch torchrun`. @USE@
@SETUP@
set -euo pipefail # not before: modules may use variables that are not set
export PYTHONUNBUFFERED=1 # lines of the log appear at once
# After SIGTERM or Ctrl-C the processes have so many seconds to finish the step and to save.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=@SAVE_SECONDS@
# Without this, torch 2.13 does not let a new node take the place of one that was lost.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec torchrun @OPTIONS@ \
    --no-python @COMMAND@
