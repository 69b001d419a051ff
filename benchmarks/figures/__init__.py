"""Every figure and table of the four papers beside ours: ``python -m benchmarks.figures``; ``make figures``.

One module per paper yields claims (a published number, ours, and what ours rests on); :mod:`benchmarks.figures.draw`
draws. Published numbers stand in ``published.json`` alone, each with its place in the paper. RAGO's are in
:mod:`benchmarks.schedule_figures`.
"""
