"""Alembic's entry point. Runs under Alembic only, on the connection that the store hands over; never import it."""

from __future__ import annotations

from alembic import context

from hybridindex.errors import StoreError
from hybridindex.store.models import Base

connection = context.config.attributes.get("connection")
if connection is None:
    raise StoreError("migrations run through hybridindex.store, which locks and backs up; not through a bare alembic")

# The caller began a transaction: everything below joins it, and either all of the upgrade stays or none.
context.configure(
    connection=connection,
    target_metadata=Base.metadata,
    render_as_batch=connection.dialect.name == "sqlite",
)
context.run_migrations()
