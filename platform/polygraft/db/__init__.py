"""The registry database: models and sessions."""
