"""A discrete-event simulator of a hybrid RAG server in virtual time, calibrated with a stored profile, seeded.

Start at :func:`hybridindex.studies.simulator.system.simulate`. docs/simulator.md says what is modelled and what is not.
"""

from hybridindex.studies.simulator.arrivals import Workload, bursty, from_trace, poisson
from hybridindex.studies.simulator.engine_fit import EngineFit, Served, fit_engine
from hybridindex.studies.simulator.engine_loop import EngineRules
from hybridindex.studies.simulator.llm_server import LLMServer, fit_llm
from hybridindex.studies.simulator.outcome import Outcome
from hybridindex.studies.simulator.policies import POLICIES, Inputs, Unservable, build_system
from hybridindex.studies.simulator.rates import RateFound, compliant_rate
from hybridindex.studies.simulator.system import System, simulate

__all__ = [
    "POLICIES",
    "EngineFit",
    "EngineRules",
    "Inputs",
    "LLMServer",
    "Outcome",
    "RateFound",
    "Served",
    "System",
    "Unservable",
    "Workload",
    "build_system",
    "bursty",
    "compliant_rate",
    "fit_engine",
    "fit_llm",
    "from_trace",
    "poisson",
    "simulate",
]
