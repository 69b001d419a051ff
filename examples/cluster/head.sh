#!/usr/bin/env bash
# The first machine of a cluster on plain machines: Ray's head, with token authentication.
#
#   ./head.sh 10.0.0.5
#
# 10.0.0.5: this machine's address in a network that only machines of the cluster reach. Ray listens on all addresses,
# whatever it is told, so a firewall has to keep others from its ports.
set -euo pipefail
# Ray would let everybody on this machine read the token.
umask 077
address=${1:?this address of this machine that the others reach}
export RAY_AUTH_MODE=token
# Writes ~/.ray/auth_token where there is none, and prints it.
ray get-auth-token --generate >/dev/null
# No search passes through Ray: its object store may be as small as it gets.
exec ray start --head --block --node-ip-address "$address" --port 6379 --include-dashboard false --disable-usage-stats \
    --num-cpus 1 --object-store-memory 80000000
