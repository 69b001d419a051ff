#!/usr/bin/env bash
# A further machine of the cluster, which has the token of the first one:
#
#   scp -p 10.0.0.5:.ray/auth_token ~/.ray/auth_token     # in a folder of mode 700
#   ./join.sh 10.0.0.5 10.0.0.6
#
# 10.0.0.5: the first machine. 10.0.0.6: this one's address, as for head.sh.
set -euo pipefail
umask 077
head=${1:?the address of the first machine}
address=${2:?this address of this machine that the others reach}
export RAY_AUTH_MODE=token
exec ray start --block --address "$head:6379" --node-ip-address "$address" --disable-usage-stats \
    --num-cpus 1 --object-store-memory 80000000
