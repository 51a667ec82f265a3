"""Memories as layers."""
