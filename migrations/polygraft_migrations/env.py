"""What Alembic runs: the models' metadata on the connection that runner.py opened."""

from alembic import context

from polygraft.db import Base

connection = context.config.attributes["connection"]
# SQLite cannot alter a column in place: batch mode copies the table instead.
context.configure(
    connection=connection,
    target_metadata=Base.metadata,
    compare_type=True,
    render_as_batch=connection.dialect.name == "sqlite",
)
with context.begin_transaction():
    context.run_migrations()
