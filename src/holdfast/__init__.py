"""Holdfast hosts AI agents for many users at once and keeps them under control."""
