"""Medusa heads for Kimi-K2.5: train them on cached hidden states, know what they will accept, serve them."""

__version__ = "0.1.0"
