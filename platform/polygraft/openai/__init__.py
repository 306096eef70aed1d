"""The tenant's API, as OpenAI's clients speak it."""
