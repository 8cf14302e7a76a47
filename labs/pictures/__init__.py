"""How it is shown: objects that draw themselves in one palette."""
