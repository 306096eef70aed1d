"""Prompts in, tokens and text out: the batched engine. No HTTP, no database, no Redis, no tenants."""
