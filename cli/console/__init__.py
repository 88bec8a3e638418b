"""The operator's page: a web server on this machine, for whoever started it."""
