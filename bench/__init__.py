"""Measurements, run by hand: nothing here is a test, and nothing here is deployed."""
