"""One decoder, described by a table of architectures; reading it from a Hugging Face folder."""
