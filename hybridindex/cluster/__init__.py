"""Several machines: an index whose lists are spread over the nodes of a Ray cluster. See docs/cluster.md."""

from hybridindex.cluster.cluster import Cluster, connect, plan_nodes, start, stop
from hybridindex.cluster.nodes.options import NodeOptions
from hybridindex.cluster.router import ClusterRouter
from hybridindex.cluster.state import ClusterRequest

__all__ = ["Cluster", "ClusterRequest", "ClusterRouter", "NodeOptions", "connect", "plan_nodes", "start", "stop"]
