"""Attention: watched without being stored, masked, re-routed."""
