"""What another machine would do with a profiled index: curves, rates, bytes, and what they are sensitive to.

Start at :func:`hybridindex.studies.what_if.forecast.forecast`. Computed from a profile, a hardware profile and a
model; nothing is measured, placed or stored, and no answer here can be applied to a router. Queues are the
partitioner's (a batch waits for a batch); :mod:`hybridindex.studies.simulator` plays requests one by one.
"""

from hybridindex.studies.what_if.designs import Design
from hybridindex.studies.what_if.fleet import Fleet, LLMService, parse_fleet
from hybridindex.studies.what_if.forecast import Forecast, forecast
from hybridindex.studies.what_if.residents import CurvePoint
from hybridindex.studies.what_if.setting import INPUTS, Setting

__all__ = ["INPUTS", "CurvePoint", "Design", "Fleet", "Forecast", "LLMService", "Setting", "forecast", "parse_fleet"]
