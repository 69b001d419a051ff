"""The control store's schema history (Alembic), shipped inside the package.

:mod:`hybridindex.store.migrate` runs it when a store is opened; there is no ``alembic.ini``. ``env.py`` and
``script.py.mako`` are Alembic's: the first runs under Alembic only and must not be imported. A released version is
never edited; a new one is drafted from the models with::

    alembic.command.revision(hybridindex.store.migrate.alembic_config(connection), "what changes", autogenerate=True)

Each version runs inside one transaction with all others of the same upgrade, on SQLite and PostgreSQL alike: no
``autocommit_block``, and on SQLite ``op.batch_alter_table`` where a column or constraint changes.

Rows have digests over all their columns (:mod:`hybridindex.store.digests`). A version that adds, renames or removes a
column of a table, or changes its rows, sets their digests to NULL in the same step: ``digest`` of ``profiles``,
``plans``, ``events`` or ``refresh_schedule``; ``sample_digests`` of ``profiles`` for a table of samples; ``digest`` of
``profiles`` or ``plans`` for their arrays. Such rows are read as those of older versions. A test upgrades a store of
version 0006.
"""
