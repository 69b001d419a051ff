"""Changes of an index in a simulation: writers, compaction, readers and kills drawn from a seed, on a disk that loses,
tears and reorders what was not synced."""

import os

if _name := os.environ.get("HYBRIDINDEX_CHANGES_MUTANT"):
    # Before anything imports the product: workers are processes of their own.
    from tests.simulation.changes.mutants import all_mutants
    from tests.simulation.mutants import install_mutant

    install_mutant(all_mutants()[_name])
