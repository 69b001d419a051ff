"""What another machine would do with a profiled index: curves, rates, bytes, and what they are sensitive to.

Start at :func:`hybridindex.studies.what_if.forecast.forecast`. Computed from a profile, a hardware profile and a model.
Measures, places and stores nothing; a forecast cannot be applied to a router. Queueing is the partitioner's (a batch
waits for a batch). :mod:`hybridindex.studies.simulator` simulates single requests.
"""

from hybridindex.studies.what_if.designs import Design
from hybridindex.studies.what_if.fleet import Fleet, LLMService, parse_fleet
from hybridindex.studies.what_if.forecast import Forecast, forecast
from hybridindex.studies.what_if.residents import CurvePoint
from hybridindex.studies.what_if.setting import INPUTS, Setting

__all__ = ["INPUTS", "CurvePoint", "Design", "Fleet", "Forecast", "LLMService", "Setting", "forecast", "parse_fleet"]
