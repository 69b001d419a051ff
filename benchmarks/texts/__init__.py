"""Numbers in the documents, taken from benchmarks/results: ``python -m benchmarks.texts``.

``benchmarks/texts/NAME.md`` is a Jinja template with a block for each passage of a document that has numbers. The
document has the passage between ``<!-- block: begin -->`` and ``<!-- block: end -->``; around it is written by hand. A
test renders every block and compares.
"""
