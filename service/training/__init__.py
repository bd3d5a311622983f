"""Recipes that make the embedded models and heads for other targets."""
