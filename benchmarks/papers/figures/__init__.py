"""Every figure and table of the four papers beside ours: ``python -m benchmarks.papers.figures``; ``make figures``.

One module per paper yields claims (a published number, ours, and what ours rests on);
:mod:`benchmarks.papers.figures.draw`
draws. Published numbers stand in ``published.json`` alone, each with its place in the paper. RAGO's are in
:mod:`benchmarks.papers.schedule_figures`.
"""
