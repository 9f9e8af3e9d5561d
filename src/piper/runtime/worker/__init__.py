"""One rank: its memory, its Tasks and what it holds."""
