"""The whole local stack under load while all around it breaks; then the books are balanced."""
