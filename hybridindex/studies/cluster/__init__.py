"""A cluster of equal nodes in virtual time, from one machine's profile and numbers of a network, seeded.

Start at :func:`hybridindex.studies.cluster.scale_out.scale_out`. docs/simulator.md says what is modelled and what not.
"""

from hybridindex.studies.cluster.node_loop import ClusterRun, serve
from hybridindex.studies.cluster.scale_out import NodesFound, explain, scale_out
from hybridindex.studies.cluster.system import ClusterInputs, ClusterSystem, Network, build_cluster
from hybridindex.studies.cluster.visits import Visits

__all__ = [
    "ClusterInputs",
    "ClusterRun",
    "ClusterSystem",
    "Network",
    "NodesFound",
    "Visits",
    "build_cluster",
    "explain",
    "scale_out",
    "serve",
]
