"""Is everything in order: findings with a cause and a remedy, before an event has to show it."""
