"""The commands of manage.py. Not deployed."""
