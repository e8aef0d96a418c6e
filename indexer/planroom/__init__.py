"""Index construction drawing sets into Postgres, resumably, and find the sheet."""
