"""How much to draft: decided from earlier rounds only, never from the tokens in question."""
