"""For the processes of vLLM, which wait for each other by yielding their core a million times a second.

On Linux 6.18 all other processes of a machine then stand still, for 20 s at a time where there are two cores. Python
imports this file at its start: a wait that sleeps for no time lets others run.
"""

import os
import time

os.sched_yield = lambda: time.sleep(0)
