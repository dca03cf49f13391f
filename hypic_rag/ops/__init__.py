"""Numerical building blocks: plain torch, device-agnostic."""
