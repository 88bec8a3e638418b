"""Tells an operator: notifications in the application database, carried out by a processor."""
