"""What the three functions share. ARCHITECTURE.md has the map; imports point down only."""
