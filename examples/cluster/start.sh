#!/usr/bin/env bash
# Starts the nodes, from any machine of the cluster:
#
#   ./start.sh /shared/idx
#
# The index is on a file system that all machines share, at the same path. Each machine has a certificate for its own
# address at the same paths (README.md).
set -euo pipefail
index=${1:?the index directory}
export RAY_AUTH_MODE=token
hybridindex cluster start "$index" --host auto --memory-per-node 48GiB --replicas 2 --serve "--port 7001" \
    --data /var/lib/hybridindex/nodes --tls-cert /etc/hybridindex/node.pem --tls-key /etc/hybridindex/node.key \
    --tls-ca /etc/hybridindex/ca.pem
hybridindex cluster status "$index"
