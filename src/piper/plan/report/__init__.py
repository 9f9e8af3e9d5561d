"""Plans in words: text, summary, explanation, difference, volume."""
