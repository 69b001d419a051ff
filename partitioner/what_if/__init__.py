"""What another machine would do with a profiled index: curves, rates, bytes, and what they are sensitive to.

Start at :func:`hybridindex.partitioner.what_if.forecast.forecast`. Computed from a profile, a hardware profile and a
model; nothing is measured, placed or stored, and no answer here can be applied to a router. Queues are the
partitioner's (a batch waits for a batch); :mod:`hybridindex.simulator` plays requests one by one.
"""

from hybridindex.partitioner.what_if.designs import Design
from hybridindex.partitioner.what_if.fleet import Fleet, LLMService, parse_fleet
from hybridindex.partitioner.what_if.forecast import Forecast, forecast
from hybridindex.partitioner.what_if.residents import CurvePoint
from hybridindex.partitioner.what_if.setting import INPUTS, Setting

__all__ = ["INPUTS", "CurvePoint", "Design", "Fleet", "Forecast", "LLMService", "Setting", "forecast", "parse_fleet"]
